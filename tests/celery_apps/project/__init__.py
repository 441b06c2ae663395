"""A Celery project, written as any other: nothing in it knows Umbel. Its app is in `celery.py`."""
