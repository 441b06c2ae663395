"""Where an unmodified Celery project behaves otherwise under `umbel worker`: case -> why.

`docs/celery.md` shows this table. A case that is listed must really differ: one that does not any more
fails the test, and its line goes.
"""

DIFFERENCES: dict[str, str] = {}
