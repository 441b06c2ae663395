"""The Django app of `umbel.contrib.django` in INSTALLED_APPS."""

from django.apps import AppConfig


class UmbelConfig(AppConfig):
    """Registers Umbel as a Django app, with its management command."""

    name = "umbel.contrib.django"
    label = "umbel"  # Django would use "django", the last part of the name
    verbose_name = "Umbel"
