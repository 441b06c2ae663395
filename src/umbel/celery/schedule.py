"""CelerySchedule: send the project's periodic tasks from the worker that holds a lease.

Celery's scheduler class, or the project's (such as that of `django_celery_beat`), decides which tasks are
due. One worker of the cluster runs it. Tasks are sent in one step with a check of the lease and with the
times of the last runs. Therefore a leader that lost its lease cannot send, and the next leader continues
without losing or repeating a run. RabbitMQ cannot do this in one step; there the times are written first, so
a run can be lost but not repeated.
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
TICK_MAX_S = 5.0  # limit for the time until a changed or added entry is noticed
# a header of messages that workers send; messages of `celery beat` do not have it
SCHEDULE_HEADER = "umbel_schedule"

_Times = dict[str, tuple[float, int]]  # for each entry: the Unix time of the last run, and the number of runs


class LeaseLost(Exception):
    """Raised if another worker holds the lease. Nothing was sent."""


class CelerySchedule:
    """The scheduler of one leader during one term (`worker/foreign_scheduler.py`)."""

    def __init__(self, app: Any, leadership: SchedulerTerm) -> None:
        self._app = app
        self._leadership = leadership
        self._scheduler: Any = None

    def start(self) -> None:
        """Create the project's scheduler with the times that the last leader stored."""
        self._scheduler = _make(self._app, self._leadership)

    def tick(self) -> float:
        """Send the tasks that are due, and return the seconds until the next tick. Raise LeaseLost if
        another worker leads.
        """
        if self._scheduler is None:
            self.start()
        try:
            return min(float(self._scheduler.tick()), TICK_MAX_S)
        except (LeaseLost, BrokerUnavailable):
            self._drop()  # this scheduler counts the task as sent; a new one reads the stored times
            raise

    def close(self, lost: bool) -> None:
        """Save the scheduler's state unless the lease is `lost`."""
        if self._scheduler is None:
            return
        if lost:
            self._drop()
        else:
            self._scheduler.sync()

    def _drop(self) -> None:
        """Discard the scheduler without saving its state, because another leader may have stored newer
        times.
        """
        scheduler, self._scheduler = self._scheduler, None
        getattr(scheduler, "_dirty", set()).clear()
        finalize = getattr(scheduler, "_finalize", None)
        if finalize is not None:
            finalize.cancel()


@cache
def warn_of_beat() -> None:
    """Warn once in a process that `celery beat` sends the same tasks as the workers."""
    log.warning(
        "`celery beat` sent a task that workers also send, so it runs twice; "
        "stop `celery beat`, or start workers with --without-schedule"
    )


def has_schedule(app: Any) -> bool:
    """Return whether the app has a schedule: entries in the settings, or a scheduler class that may read
    them elsewhere.
    """
    app.finalize()
    return bool(app.conf.beat_schedule) or _is_custom(_class_of(app))


def _class_of(app: Any) -> Any:
    """Import the scheduler class of the project. Raise ConfigurationError if this fails."""
    stated = app.conf.beat_scheduler
    try:
        return symbol_by_name(stated)
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(
            f"beat_scheduler {stated!r} cannot be imported: {error}; install it or correct the setting"
        ) from None


def _is_custom(kind: Any) -> bool:
    """Return whether this is not one of Celery's own scheduler classes."""
    return kind not in (Scheduler, PersistentScheduler)


def _make(app: Any, leadership: SchedulerTerm) -> Any:
    """Create the project's scheduler, fenced by the lease. Celery's default scheduler is used without its
    file.
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
    """Continue from the times of the last leader. A scheduler class that stores times itself may not have
    stored the last one.
    """
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
    """A mixin for scheduler classes: it sends under the lease, and syncs as often as Celery.

    Syncing after each send would not be safer, because the times are stored with the lease.
    `django_celery_beat` writes complete rows when it syncs, which could overwrite concurrent edits.
    """

    umbel_leadership: SchedulerTerm
    umbel_times: _Times
    umbel_has_sent = False
    producer = None  # no separate connection is used for sending

    def reserve(self, entry: Any) -> Any:
        """Return the entry after its next run, and store its times for `apply_entry`."""
        reserved = super().reserve(entry)  # type: ignore[misc]
        self.umbel_times[reserved.name] = (reserved.last_run_at.timestamp(), reserved.total_run_count or 0)
        return reserved

    def should_sync(self) -> bool:
        """Return whether to save the state, at most as often as Celery does."""
        return self.umbel_has_sent and bool(super().should_sync())  # type: ignore[misc]

    def apply_entry(self, entry: Any, producer: Any = None) -> None:
        """Send a task that is due, with the times of the last runs, if this worker still holds the lease."""
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
        """Return the encoded times of the entries that still exist."""
        return msgspec.json.encode({name: time for name, time in self.umbel_times.items() if name in names})


def _marked(entry: Any) -> Any:
    """Add the header of messages that workers send."""
    headers = {**(entry.options.get("headers") or {}), SCHEDULE_HEADER: True}
    entry.options = {**entry.options, "headers": headers}
    return entry


def _decode(state: bytes) -> _Times:
    """Decode the stored times. If they are unreadable, log an error and start without them."""
    try:
        return msgspec.json.decode(state, type=_Times) if state else {}
    except UNREADABLE:
        log.error("cannot read when periodic tasks last ran; starting the schedule without these times")
        return {}
