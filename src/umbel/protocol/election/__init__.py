"""Decisions about elections: which node does what must be done once, by the store's rules and by Celery's."""
