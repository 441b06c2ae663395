"""Django's settings, for results that django-celery-results stores: in a database or in a cache."""

import os

SECRET_KEY = "for tests"
USE_TZ = True
INSTALLED_APPS = ["django_celery_results"]
DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": os.environ.get("DJANGO_DATABASE", ":memory:"),
        # Parts of a chord are counted by a read and a write: of two deferred transactions that do so at once
        # SQLite refuses one, however long it may wait.
        "OPTIONS": {"timeout": 60, "transaction_mode": "IMMEDIATE"},
    }
}
CACHES = {
    "default": {
        "BACKEND": "django.core.cache.backends.filebased.FileBasedCache",
        "LOCATION": os.environ.get("DJANGO_CACHE", ""),
        "OPTIONS": {"MAX_ENTRIES": 100_000},
    }
}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
