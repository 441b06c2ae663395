"""A loader of the shop's own."""

from celery.loaders.app import AppLoader


class Loader(AppLoader):
    """Reads settings from somewhere else, one day."""
