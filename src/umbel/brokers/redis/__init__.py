"""The broker on a Redis server: keys and lists as Celery has them, and scripts for atomic steps."""
