"""Commands about Celery projects."""
