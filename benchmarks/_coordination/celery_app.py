"""A Celery app for workers that do nothing but coordinate; its broker is in CELERY_BROKER_URL."""

# mypy: disable-error-code="untyped-decorator"

from celery import Celery

app = Celery("coordination")


@app.task
def nothing() -> None:
    """What elections have sent."""
