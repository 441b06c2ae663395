"""A shop's Celery project, in the manner of public ones: nothing in it knows Umbel."""
