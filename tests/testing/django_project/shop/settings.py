"""Of a shop with one table."""

SECRET_KEY = "for tests"
ALLOWED_HOSTS = ["testserver"]
INSTALLED_APPS = ["umbel.contrib.django", "shop"]
UMBEL = {"BROKER": "redis://127.0.0.1:1/0"}
ROOT_URLCONF = "shop.urls"
DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
USE_TZ = True
