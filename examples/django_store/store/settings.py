"""The store's settings. The database is SQLite, or the PostgreSQL that PGDATABASE, PGHOST, … name."""

import os
from pathlib import Path

BASE_DIR = Path(__file__).parent.parent
SECRET_KEY = "for the example"
ALLOWED_HOSTS = ["testserver", "localhost"]
INSTALLED_APPS = ["umbel.contrib.django", "store"]
ROOT_URLCONF = "store.urls"
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
USE_TZ = True

SQLITE = {"ENGINE": "django.db.backends.sqlite3", "NAME": BASE_DIR / "store.sqlite3"}
POSTGRESQL = {"ENGINE": "django.db.backends.postgresql", "NAME": os.environ.get("PGDATABASE")}
DATABASES = {"default": POSTGRESQL if "PGDATABASE" in os.environ else SQLITE}

UMBEL = {
    "SEND_ON_COMMIT": True,  # a task that is sent in a transaction waits for its commit
    "TASK_TIME_LIMIT_S": 60,
}
