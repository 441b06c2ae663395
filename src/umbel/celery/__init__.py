"""Run Celery projects unchanged with `umbel worker -A proj`.

The project's code still uses Celery as a library, and Celery's tracer runs its tasks. Umbel's worker does
everything else: consuming, acknowledgements, leases, the pool, limits, control, gossip, events, schedule,
history.

Only this package may import celery, kombu and billiard. It is loaded only if the app of a command is a
`celery.Celery`, so that Umbel works without Celery.
"""
