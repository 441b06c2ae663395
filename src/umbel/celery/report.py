"""What a starting worker says of a Celery project: refuses what it cannot honour, and logs the rest."""

import logging
from collections.abc import Iterable, Sequence
from typing import Any

from msgspec.structs import replace

from umbel.app.configuration.settings import Settings
from umbel.celery.configuration import settings_of
from umbel.celery.table.verdicts import Verdict
from umbel.celery.usage import Finding, findings, recommendations
from umbel.errors import ConfigurationError
from umbel.pools.abilities import OPTIONS, lacks

log = logging.getLogger("umbel.celery")


def refuse_or_report(app: Any, settings: Settings) -> None:
    """The app must be loaded: its modules bring bootsteps, tasks and signals."""
    found = [one for one in findings(app) if _concerns(one, app, settings)]
    refused = [one for one in found if one.judged.refused]
    if refused:
        problems = "; ".join(f"{_named(one)}: {one.judged.note}" for one in refused)
        raise ConfigurationError(
            f"cannot run this Celery project. {problems}. `umbel celery check` lists all that it uses"
        )
    settings = [one for one in found if one.group == "settings"]
    _log("Celery settings that work", settings, Verdict.WORKS)
    _log("Celery settings that differ", settings, Verdict.DIFFERS, with_notes=True)
    _log("Celery settings without effect", settings, Verdict.NO_EFFECT, with_notes=True)
    _log("not supported, and left out", found, Verdict.NOT_SUPPORTED, logging.WARNING, with_notes=True)
    for advice in recommendations(app)[:1]:
        log.info("recommendation: %s", advice)


def for_the_pool(app: Any, settings: Settings) -> Settings:
    """Without what the project's settings say of child processes, in a pool that has none: so in Celery."""
    stated = settings_of(app)
    for name in ("worker_max_tasks_per_child", "worker_max_memory_per_child", "worker_child_start"):
        reason = lacks(settings.worker_pool, OPTIONS[name])
        if reason and getattr(settings, name) == getattr(stated, name) != getattr(Settings(), name):
            log.warning("%s has no effect in the pool %s: %s", name, settings.worker_pool, reason)
            settings = replace(settings, **{name: getattr(Settings(), name)})
    return settings


def _concerns(one: Finding, app: Any, settings: Settings) -> bool:
    """Options of the command win: a worker with -P or -Q needs no other pool and no other queue."""
    if one.group == "queues":
        return one.name in settings.worker_queues
    return one.name != "worker_pool" or settings.worker_pool == settings_of(app).worker_pool


def _log(
    what: str,
    found: Iterable[Finding],
    verdict: Verdict,
    level: int = logging.INFO,
    *,
    with_notes: bool = False,
) -> None:
    chosen: Sequence[Finding] = [one for one in found if one.judged.verdict is verdict]
    if chosen:
        shown = [f"{_named(one)} ({one.judged.note})" if with_notes else _named(one) for one in chosen]
        log.log(level, "%s: %s", what, "; ".join(shown) if with_notes else ", ".join(shown))


def _named(one: Finding) -> str:
    return one.name if one.group == "settings" else f"{one.group}: {one.name}"
