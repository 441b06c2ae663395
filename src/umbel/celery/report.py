"""What a starting worker says of a Celery project: refuses what it cannot honour, and logs the rest."""

import logging
from collections.abc import Iterable, Sequence
from typing import Any

from umbel.celery.table.verdicts import Verdict
from umbel.celery.usage import Finding, findings, recommendations
from umbel.errors import ConfigurationError

log = logging.getLogger("umbel.celery")


def refuse_or_report(app: Any) -> None:
    """The app must be loaded: its modules bring bootsteps, tasks and signals."""
    found = findings(app)
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
