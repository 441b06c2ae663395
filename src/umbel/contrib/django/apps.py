"""What Django knows of `umbel.contrib.django` in INSTALLED_APPS."""

from django.apps import AppConfig


class UmbelConfig(AppConfig):
    name = "umbel.contrib.django"
    label = "umbel"  # the last part of the name, as Django would have it, says too little
    verbose_name = "Umbel"
