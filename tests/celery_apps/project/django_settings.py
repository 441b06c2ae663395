"""Django's settings of the deployment that stores results with django-celery-results."""

import os

SECRET_KEY = "for tests"
USE_TZ = True
INSTALLED_APPS = ["django_celery_results"]
DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": os.environ.get("DJANGO_DATABASE", ":memory:"),
        "OPTIONS": {"timeout": 60},
    }
}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
