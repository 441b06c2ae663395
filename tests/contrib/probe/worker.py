"""A module for `-A`: it sets Django up itself, so the database is asked before tasks are found."""

import django

django.setup()

from umbel.contrib.django import app  # noqa: E402 (needs Django)

__all__ = ["app"]
