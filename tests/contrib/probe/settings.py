"""The store's, with connections that last and are looked at before they are used."""

from store.settings import *  # noqa: F403 (as settings are extended)
from store.settings import DATABASES, INSTALLED_APPS

INSTALLED_APPS = [*INSTALLED_APPS, "probe"]
DATABASES["default"] |= {"CONN_MAX_AGE": None, "CONN_HEALTH_CHECKS": True}
UMBEL = {"SEND_ON_COMMIT": True}  # and no time limit, which not every pool can enforce
LOGGING = {"version": 1}  # which turns off every logger that is there before it
