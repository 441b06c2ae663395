"""A Django project with Celery, as its documentation says one is made. Nothing here knows Umbel."""

from shop.celery import app as celery_app

__all__ = ("celery_app",)
