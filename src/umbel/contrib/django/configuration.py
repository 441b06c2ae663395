"""The setting `UMBEL` of a Django project, as an app takes it.

Names are those of docs/settings.md, in capitals as Django's own or as they are there. What is unknown or
cannot be used is refused when Django starts, not when the first task is sent.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from django.conf import ENVIRONMENT_VARIABLE, settings

from umbel.app.configuration.settings import Settings, with_others
from umbel.errors import BadSetting, ConfigurationError, UnknownSetting

DEFAULT_DATABASE = "default"
SEND_ON_COMMIT = "send_on_commit"
SOURCE = "UMBEL of Django's settings"
_KNOWN = (*Settings.__struct_fields__, SEND_ON_COMMIT)


@dataclass(frozen=True, slots=True)
class DjangoSettings:
    """`send_on_commit`: the database whose transactions every send waits for; None: sends wait for none."""

    name: str
    directory: Path | None
    send_on_commit: str | None
    of_app: Mapping[str, Any]


def read_settings() -> DjangoSettings:
    if not settings.configured and not os.environ.get(ENVIRONMENT_VARIABLE):
        raise ConfigurationError(
            "umbel.contrib.django finds no settings of Django: run `python manage.py umbel ...`, "
            f"or set {ENVIRONMENT_VARIABLE}"
        )
    module = getattr(settings, "SETTINGS_MODULE", None) or "django"
    given = _named(getattr(settings, "UMBEL", {}))
    return DjangoSettings(
        name=module.partition(".")[0],
        directory=_directory(getattr(settings, "BASE_DIR", None)),
        send_on_commit=_database(given.pop(SEND_ON_COMMIT, False)),
        of_app=given,
    )


def _named(given: object) -> dict[str, Any]:
    """The settings by the names that an app has for them, checked."""
    if not isinstance(given, Mapping):
        raise ConfigurationError(
            # Not its value, which may hold a password.
            f'{SOURCE} is of type {type(given).__name__}: it must be a dict, such as {{"BROKER": "redis://..."}}'
        )
    named: dict[str, Any] = {}
    for written, value in given.items():
        name = str(written).lower()
        if name not in _KNOWN:
            raise UnknownSetting(
                written, [one.upper() if str(written).isupper() else one for one in _KNOWN], source=SOURCE
            )
        if name in named:
            raise ConfigurationError(f"{SOURCE} has {name!r} twice, in upper and lower case; keep one")
        named[name] = value
    with_others(
        Settings(), {name: value for name, value in named.items() if name != SEND_ON_COMMIT}, source=SOURCE
    )
    return named


def _database(asked: object) -> str | None:
    if asked is False or asked is None:
        return None
    database = DEFAULT_DATABASE if asked is True else asked
    if isinstance(database, str) and database in settings.DATABASES:
        return database
    known = ", ".join(map(repr, settings.DATABASES))
    raise BadSetting(
        "SEND_ON_COMMIT", asked, f"it must be True, False or one of DATABASES: {known}", source=SOURCE
    )


def _directory(base: object) -> Path | None:
    """Where `umbel.db` lies, if that is the broker: beside the project, wherever a process is started."""
    return Path(base) if isinstance(base, str | Path) and Path(base).is_dir() else None
