"""Periodic tasks: the tasks that an app wants sent on a schedule, by the worker that leads.

    @app.periodic(every=30)
    @app.task
    def refresh(): ...

    @app.periodic(cron="15 4 * * mon-fri", tz="Europe/Vienna", catch_up="all")
    def nightly(): ...

The message of a slot has an id that follows from the entry's name and the slot, so that anyone can check
which slots were sent, and `umbel task show` finds it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, tzinfo
from typing import TYPE_CHECKING, Any, TypeVar, cast
from uuid import NAMESPACE_URL, uuid5
from zoneinfo import ZoneInfo

from cronsim import CronSim, CronSimError

from umbel.app.canvas.signature import Signature
from umbel.app.options import SendOptions
from umbel.app.request import Request, RequestScope
from umbel.app.task import Task
from umbel.errors import ConfigurationError
from umbel.protocol.leadership.schedule import CatchUp, Entry, Every, Rule
from umbel.wire.message import Outgoing

if TYPE_CHECKING:
    from umbel.app.app import App

EVERY_MIN_S = 0.1
SLOT_IDS = "umbel:periodic"
PERIODIC_HEADER = "periodic_task_name"  # of the message of a slot, as django-celery-beat names it
# How far back the last slot of a cron expression is looked for, first near, then far: leap days are
# at most eight years apart.
_LOOK_BACK = tuple(timedelta(days=days) for days in (1 / 720, 1 / 24, 1, 32, 366, 3000))
TaskT = TypeVar("TaskT", bound=Callable[..., Any])


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
        """The last slot up to this time; 0 if there is none. Looks forward from further and further back, so
        that summer time is treated alike in both directions.
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
    said: str  # the rule in words

    @property
    def name(self) -> str:
        """The name of the entry, unique in the app."""
        return self.entry.name

    def messages(self, at_us: int) -> Sequence[Outgoing]:
        """The messages of one slot: the task, under an id that follows from the slot.

        They have no sending task, whatever runs in this process, and so are signed where there are keys.
        """
        given = self.signature.options.get("headers") or {}
        call = self.signature.clone(headers={**given, PERIODIC_HEADER: self.name})
        call.freeze(slot_id(self.name, at_us))
        with RequestScope(Request()):
            return [prepared.outgoing for prepared in call.prepare()]


def slot_id(name: str, at_us: int) -> str:
    """The id of the task that is sent for a slot; the same on every node."""
    return str(uuid5(uuid5(NAMESPACE_URL, SLOT_IDS), f"{name}@{at_us}"))


class Timetable:
    """An app's periodic tasks, by name."""

    def __init__(self, app: "App") -> None:
        self.entries: dict[str, Periodic] = {}
        self._app = app

    def add(
        self,
        signature: Signature[Any],
        *,
        every: float | timedelta | None,
        cron: str | None,
        tz: str,
        catch_up: str,
        name: str | None,
    ) -> None:
        """Add an entry; ConfigurationError for a name that is taken, or an invalid rule."""
        named = name or signature.task
        if named in self.entries:
            raise ConfigurationError(f"two periodic tasks are named {named!r}; give one another name=")
        rule, words = _rule(named, every, cron, tz)
        entry = Entry(named, rule, _catch_up(named, catch_up))
        self.entries[named] = Periodic(entry, signature, words)

    def decorator(
        self, args: Sequence[Any], kwargs: Mapping[str, Any] | None, options: SendOptions, **rule: Any
    ) -> Callable[[TaskT], TaskT]:
        """A decorator that makes a function a task, if it is none, and schedules it."""

        def register(function: TaskT) -> TaskT:
            task: Any = function if isinstance(function, Task) else self._app.task(function)
            self.add(Signature(task.name, args, kwargs, options, app=self._app), **rule)
            return cast(TaskT, task)

        return register


def _rule(name: str, every: float | timedelta | None, cron: str | None, tz: str) -> tuple[Rule, str]:
    if (every is None) == (cron is None):
        raise ConfigurationError(f"periodic task {name!r}: give exactly one of every= and cron=")
    if every is not None:
        seconds = every.total_seconds() if isinstance(every, timedelta) else every
        if not EVERY_MIN_S <= seconds < float("inf"):
            problem = f"every={every!r} must be a number of seconds, at least {EVERY_MIN_S}"
            raise ConfigurationError(f"periodic task {name!r}: {problem}")
        return Every(round(seconds * 1_000_000)), f"every {seconds:g} s"
    assert cron is not None
    rule = Cron(cron, _zone(name, tz))
    try:
        rule.after(_us(datetime.now(UTC)))
    except CronSimError as error:
        problem = f"cron={cron!r} is not valid: {error}; write five fields: minute hour day month weekday"
        raise ConfigurationError(f"periodic task {name!r}: {problem}") from None
    return rule, f"{cron} ({tz})"


def _zone(name: str, tz: str) -> tzinfo:
    try:
        return ZoneInfo(tz)
    except (KeyError, ValueError, OSError):  # missing, an invalid name, a folder
        problem = f"tz={tz!r} is not a time zone that this machine knows; write it as Europe/Vienna"
        raise ConfigurationError(f"periodic task {name!r}: {problem}") from None


def _catch_up(name: str, given: str) -> CatchUp:
    try:
        return CatchUp(given)
    except ValueError:
        known = ", ".join(CatchUp)
        raise ConfigurationError(
            f"periodic task {name!r}: catch_up={given!r} must be one of {known}"
        ) from None


def _when(at_us: int, zone: tzinfo) -> datetime:
    return datetime.fromtimestamp(at_us / 1_000_000, zone)


def _us(moment: datetime) -> int:
    return round(moment.timestamp() * 1_000_000)
