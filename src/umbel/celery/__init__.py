"""Runs Celery projects unchanged: `umbel worker -A proj`.

Celery stays the library that the project's code uses, and its tracer runs the tasks; everything around it
(consuming, acks, leases, pool, limits, control, gossip, events, schedule, history) is Umbel's worker.

This is the only package that may import celery, kombu or billiard, and it is loaded only if the app that a
command was given is a `celery.Celery`.
"""
