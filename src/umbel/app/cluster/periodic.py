"""Periodic tasks: the tasks that an app wants sent on a schedule, by the worker that leads.

    @app.periodic(every=30)
    @app.task
    def refresh(): ...

    @app.periodic(cron="15 4 * * mon-fri", tz="Europe/Vienna", catch_up="all")
    def nightly(): ...

The id of the message of a slot is derived from the name of the entry and the slot. So every node can check
which slots were sent, and `umbel task show` finds the task.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, tzinfo
from typing import Any
from uuid import NAMESPACE_URL, uuid5
from zoneinfo import ZoneInfo

from cronsim import CronSim, CronSimError

from umbel.app.canvas.signature import Signature
from umbel.app.request import Request, RequestScope
from umbel.errors import ConfigurationError
from umbel.protocol.leadership.schedule import CatchUp, Entry, Every, Rule
from umbel.wire.message import Outgoing

EVERY_MIN_S = 0.1
SLOT_IDS = "umbel:periodic"
PERIODIC_HEADER = "periodic_task_name"  # of the message of a slot, as django-celery-beat names it
# How far back to look for the last slot of a cron expression, first near, then far: leap days are at most
# eight years apart.
_LOOK_BACK = tuple(timedelta(days=days) for days in (1 / 720, 1 / 24, 1, 32, 366, 3000))


@dataclass(frozen=True, slots=True)
class Cron:
    """The times of a cron expression in a time zone."""

    expression: str
    zone: tzinfo

    def after(self, at_us: int) -> int:
        """The first slot after this time, in microseconds since 1970; the year 9999 if there is none."""
        try:
            return _us(next(CronSim(self.expression, _when(at_us, self.zone))))
        except StopIteration:  # never again within fifty years
            return _us(datetime.max.replace(tzinfo=UTC))

    def until(self, at_us: int) -> int:
        """The last slot up to this time; 0 if there is none.

        It looks forward from further and further back, so that summer time is treated alike in both
        directions.
        """
        for back in _LOOK_BACK:
            last = 0
            for slot in CronSim(self.expression, _when(at_us, self.zone) - back):
                if (slot_us := _us(slot)) > at_us:
                    break
                last = slot_us
            if last:
                return last
        return 0


@dataclass(frozen=True, slots=True)
class Periodic:
    """One entry of an app's schedule."""

    entry: Entry
    signature: Signature[Any]

    @property
    def name(self) -> str:
        """The name of the entry, unique in the app."""
        return self.entry.name

    @property
    def rule_text(self) -> str:
        """The rule in words."""
        rule = self.entry.rule
        if isinstance(rule, Every):
            return f"every {rule.interval_us / 1_000_000:g} s"
        assert isinstance(rule, Cron)
        return f"{rule.expression} ({rule.zone})"

    def messages(self, at_us: int) -> Sequence[Outgoing]:
        """The messages of one slot, with an id that is derived from the slot.

        They have no sending task, whatever runs in this process, so they are signed if there are keys.
        """
        given = self.signature.options.get("headers") or {}
        call = self.signature.clone(headers={**given, PERIODIC_HEADER: self.name})
        call.freeze(slot_id(self.name, at_us))
        with RequestScope(Request()):
            return [prepared.outgoing for prepared in call.prepare()]


def slot_id(name: str, at_us: int) -> str:
    """The id of the task that is sent for a slot, which is the same on every node."""
    return str(uuid5(uuid5(NAMESPACE_URL, SLOT_IDS), f"{name}@{at_us}"))


def make_periodic(
    name: str,
    signature: Signature[Any],
    *,
    every: float | timedelta | None,
    cron: str | None,
    tz: str,
    catch_up: str,
) -> Periodic:
    """An entry of the schedule; ConfigurationError if its rule is invalid."""
    if catch_up not in list(CatchUp):
        raise _invalid(name, f"catch_up={catch_up!r} must be one of {', '.join(CatchUp)}")
    return Periodic(Entry(name, _rule(name, every, cron, tz), CatchUp(catch_up)), signature)


def _rule(name: str, every: float | timedelta | None, cron: str | None, tz: str) -> Rule:
    if (every is None) == (cron is None):
        raise _invalid(name, "give exactly one of every= and cron=")
    if every is not None:
        seconds = every.total_seconds() if isinstance(every, timedelta) else every
        if not EVERY_MIN_S <= seconds < float("inf"):
            raise _invalid(name, f"every={every!r} must be a number of seconds, at least {EVERY_MIN_S}")
        return Every(round(seconds * 1_000_000))
    assert cron is not None
    try:
        zone = ZoneInfo(tz)
    except (KeyError, ValueError, OSError):  # the zone is missing, its name is invalid or a folder
        problem = f"tz={tz!r} is not a time zone that this machine knows; write it as Europe/Vienna"
        raise _invalid(name, problem) from None
    rule = Cron(cron, zone)
    try:
        rule.after(_us(datetime.now(UTC)))
    except CronSimError as error:
        problem = f"cron={cron!r} is not valid: {error}; write five fields: minute hour day month weekday"
        raise _invalid(name, problem) from None
    return rule


def _invalid(name: str, problem: str) -> ConfigurationError:
    return ConfigurationError(f"periodic task {name!r}: {problem}")


def _when(at_us: int, zone: tzinfo) -> datetime:
    return datetime.fromtimestamp(at_us / 1_000_000, zone)


def _us(moment: datetime) -> int:
    return round(moment.timestamp() * 1_000_000)
