"""The app."""

import os

from celery import Celery

from tests.celery_apps.project.configuration import SETTINGS

if os.environ.get("SETUP") in ("django", "cache"):
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.celery_apps.project.django_settings")

app = Celery("project")
app.conf.update(SETTINGS)
app.autodiscover_tasks(["tests.celery_apps.project"], related_name="tasks")
for name in ("canvas_tasks", "hooked", "limited", "watching"):
    app.autodiscover_tasks(["tests.celery_apps.project"], related_name=name)
