"""Celery's elections (v1), and clusters that hold both kinds of worker."""
