"""Discovery: modules of tasks that are imported when somebody needs all tasks of an app.

Not when they are named: the module that makes the app mostly names them, and they import it.
"""

import os
import sys
from collections.abc import Callable, Iterable
from importlib import import_module

Packages = Iterable[str] | Callable[[], Iterable[str]] | None


class Discovery:
    def __init__(self) -> None:
        self._waiting: list[tuple[Packages, str | None]] = []

    def add(self, packages: Packages, related_name: str | None) -> None:
        self._waiting.append((packages, related_name))

    def run(self) -> None:
        """Import what was named since this was last called."""
        while self._waiting:
            packages, related_name = self._waiting.pop(0)
            for package in _listed(packages):
                _import(package, related_name)


def _listed(packages: Packages) -> list[str]:
    if packages is None:
        packages = _apps_of_django()
    found = packages() if callable(packages) else packages
    return [found] if isinstance(found, str) else list(found)


def _apps_of_django() -> list[str]:
    """The installed apps, if this is a process of Django, and not one that only imported a part of it."""
    django, conf = sys.modules.get("django.apps"), sys.modules.get("django.conf")
    is_named = "DJANGO_SETTINGS_MODULE" in os.environ or (conf is not None and conf.settings.configured)
    return (
        [config.name for config in django.apps.get_app_configs()] if django is not None and is_named else []
    )


def _import(package: str, related_name: str | None) -> None:
    """The package, and its module of tasks if it has one."""
    if not related_name:
        import_module(package)
        return
    name = f"{package}.{related_name}"
    try:
        import_module(name)
    except ModuleNotFoundError as error:
        # The module itself, or what was named as a package is a module: it has none. Not one that it imports.
        if error.name != name:
            raise
