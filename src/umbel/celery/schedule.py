"""CelerySchedule: the project's schedule, sent by the worker that holds the lease.

Celery's own scheduler class (or the project's: `django_celery_beat`'s) decides what is due; one worker of the
cluster runs it. What it sends is sent under the lease, together with the times of the last runs. So a leader
that was cut off sends nothing, and the next one continues from there: no slot is lost, none doubled. On
RabbitMQ, which cannot do both in one step, the times are written first.
"""

import logging
from collections.abc import Container, Mapping
from datetime import datetime
from functools import cache, partial
from typing import Any

import msgspec
from celery.beat import PersistentScheduler, Scheduler
from kombu.utils.imports import symbol_by_name

from umbel.celery.messages import Capture, signed_here
from umbel.errors import BrokerUnavailable, ConfigurationError
from umbel.wire.values import UNREADABLE
from umbel.worker.foreign_scheduler import SchedulerTerm

log = logging.getLogger("umbel.celery.schedule")
TICK_MAX_S = 5.0  # a changed row or an added entry is seen within this time
SCHEDULE_HEADER = "umbel_schedule"  # a header of what workers send, missing in what a `celery beat` sends

_Times = dict[str, tuple[float, int]]  # by entry: the last run in Unix time, and how many there were


class LeaseLost(Exception):
    """Another worker leads: nothing was sent."""


class CelerySchedule:
    """The scheduler of a Celery project (`worker/foreign_scheduler.py`): one term of one leader."""

    def __init__(self, app: Any, leadership: SchedulerTerm) -> None:
        self._app = app
        self._leadership = leadership
        self._scheduler: Any = None

    def start(self) -> None:
        """Make the project's scheduler, with the times that the last leader left."""
        self._scheduler = _make(self._app, self._leadership)

    def tick(self) -> float:
        """Send what is due; returns the seconds until the next tick. LeaseLost if another worker leads."""
        if self._scheduler is None:
            self.start()
        try:
            return min(float(self._scheduler.tick()), TICK_MAX_S)
        except (LeaseLost, BrokerUnavailable):
            self._drop()  # it counts the task as sent; a new scheduler reads the stored times
            raise

    def close(self, lost: bool) -> None:
        """Save the scheduler's state, unless the lease is `lost`."""
        if self._scheduler is None:
            return
        if lost:
            self._drop()
        else:
            self._scheduler.sync()

    def _drop(self) -> None:
        scheduler, self._scheduler = self._scheduler, None
        getattr(scheduler, "_dirty", set()).clear()
        finalize = getattr(scheduler, "_finalize", None)
        if finalize is not None:
            finalize.cancel()


@cache
def warn_of_beat() -> None:
    """Warn, once in a process, that a `celery beat` sends what the workers send."""
    log.warning(
        "a task came from `celery beat`, and workers send the schedule themselves: it runs twice; "
        "stop `celery beat`, or start workers with --without-schedule"
    )


def has_schedule(app: Any) -> bool:
    """Whether there is anything to send: entries, or a scheduler class that reads them from elsewhere."""
    app.finalize()
    return bool(app.conf.beat_schedule) or _is_custom(_class_of(app))


def _class_of(app: Any) -> Any:
    stated = app.conf.beat_scheduler
    try:
        return symbol_by_name(stated)
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(
            f"beat_scheduler {stated!r} cannot be imported: {error}; install it or correct the setting"
        ) from None


def _is_custom(kind: Any) -> bool:
    return kind not in (Scheduler, PersistentScheduler)


def _make(app: Any, leadership: SchedulerTerm) -> Any:
    """The project's scheduler, fenced by the lease. The default scheduler of Celery runs here without
    its file.
    """
    kind = _class_of(app)
    kind = kind if _is_custom(kind) else Scheduler
    times = _decode(leadership.load_state())
    known = {"umbel_leadership": leadership, "umbel_times": times}
    fenced = type(f"Fenced{kind.__name__}", (_Fenced, kind), known)
    made = fenced(app=app, max_interval=app.conf.beat_max_loop_interval or TICK_MAX_S)
    _go_on_from(made, times)
    return made


def _go_on_from(scheduler: Any, times: Mapping[str, tuple[float, int]]) -> None:
    """Continue where the last leader ended. A class that stores times itself may have missed the last one."""
    keeps_times = hasattr(scheduler, "_dirty")
    for name, entry in scheduler.schedule.items():
        at, count = times.get(name, (0.0, 0))
        known = entry.last_run_at.timestamp() if entry.last_run_at else 0.0
        if not at or (keeps_times and at <= known):
            continue
        for record in (entry, getattr(entry, "model", None)):
            if record is not None:
                record.last_run_at = datetime.fromtimestamp(at, scheduler.app.timezone)
                record.total_run_count = count
        if keeps_times:
            scheduler._dirty.add(name)


class _Fenced:
    """Mixed into a scheduler class: it sends under the lease, and syncs no more often than Celery does.

    To sync after each send would be no safer, because the lease holds the times; and `django_celery_beat`
    writes whole rows then, which would overwrite concurrent edits.
    """

    umbel_leadership: SchedulerTerm
    umbel_times: _Times
    umbel_has_sent = False
    producer = None  # nothing is sent over a separate connection

    def reserve(self, entry: Any) -> Any:
        reserved = super().reserve(entry)  # type: ignore[misc]
        self.umbel_times[reserved.name] = (reserved.last_run_at.timestamp(), reserved.total_run_count or 0)
        return reserved

    def should_sync(self) -> bool:
        return self.umbel_has_sent and bool(super().should_sync())  # type: ignore[misc]

    def apply_entry(self, entry: Any, producer: Any = None) -> None:
        scheduler: Any = self
        leadership = self.umbel_leadership
        if not leadership.still_leader():
            raise LeaseLost("lease of the schedule lost before a task was sent; another worker sends it")
        self.umbel_has_sent = False
        with Capture(partial(signed_here, scheduler.app)) as capture, capture.sending():
            scheduler.apply_async(_marked(entry), producer=None, advance=False)
        if not leadership.publish(capture.follow_ups, self._times_of(scheduler.schedule)):
            raise LeaseLost("lost the lease of the schedule while sending a task; another worker sends it")
        log.info("periodic task sent", extra={"entry": entry.name, "task": entry.task})
        self.umbel_has_sent = True
        if self.should_sync():
            scheduler._do_sync()

    def _times_of(self, names: Container[str]) -> bytes:
        """The times of existing entries: a deleted entry leaves none behind."""
        return msgspec.json.encode({name: time for name, time in self.umbel_times.items() if name in names})


def _marked(entry: Any) -> Any:
    headers = {**(entry.options.get("headers") or {}), SCHEDULE_HEADER: True}
    entry.options = {**entry.options, "headers": headers}
    return entry


def _decode(state: bytes) -> _Times:
    try:
        return msgspec.json.decode(state, type=_Times) if state else {}
    except UNREADABLE:
        log.error("cannot read when periodic tasks last ran; starting the schedule without these times")
        return {}
