"""TaskEvents: the story of each task in events, told only when somebody asked for it.

Field names and forms are Celery's; `retries`, the attempt, is on every one of them, so that
attempts can be told apart.
"""

from collections.abc import Mapping
from time import time
from typing import TYPE_CHECKING, Any

import msgspec

from umbel.events.types import (
    TaskEvent,
    TaskFailed,
    TaskReceived,
    TaskRejected,
    TaskRetried,
    TaskRevoked,
    TaskStarted,
    TaskSucceeded,
    tag_of,
)
from umbel.pools.interface import Outcome, Told
from umbel.wire.retried import RETRY_OF, retry_of
from umbel.wire.task import TaskHeaders
from umbel.wire.told import told_fields
from umbel.worker.messages.claimed import Claimed
from umbel.worker.steps.events import Events

if TYPE_CHECKING:
    from umbel.events.meters import Meters

_ENDINGS: Mapping[str, type[TaskEvent]] = {
    "success": TaskSucceeded,
    "failure": TaskFailed,
    "retry": TaskRetried,
    "rejected": TaskRejected,
    "requeued": TaskRejected,
}
_ENDS = {
    "success": "succeeded",
    "failure": "failed",
    "retry": "retried",
    "rejected": "rejected",
    "requeued": "rejected",
}


class TaskEvents:
    """`meters`: what is counted of every task, also when nobody wants its events; None: nothing.

    `wanted`: somebody listens. `noted`: that, or they are counted; else `received` and `ended` do nothing.
    """

    def __init__(self, events: Events, meters: "Meters | None" = None) -> None:
        self.step = events
        self.wanted = self.noted = False
        self._meters = meters
        events.on_wanted(self._note_wanted)

    def _note_wanted(self, wanted: bool) -> None:
        self.wanted = wanted
        self.noted = wanted or self._meters is not None

    def received(self, claimed: Claimed) -> None:
        if self._meters is not None:
            claimed.received_at = time()
            if claimed.delivery.redelivered or claimed.delivery.starts:
                self._meters.note_repeat(self._meters.name(claimed.headers.task))
        if not self.wanted:
            return
        headers = claimed.headers
        name = headers.shadow or headers.task
        ids = (headers.root_id, headers.parent_id)
        described = (name, *claimed.shown, *ids, headers.eta, headers.expires)
        retried = retry_of(claimed.message.headers)
        if retried is None:
            self._tell(TaskReceived, claimed, *described)
            return
        fields = dict(zip(told_fields(TaskReceived), (headers.id, headers.retries, *described), strict=True))
        self.step.tell_fields(tag_of(TaskReceived), fields | {RETRY_OF: retried})

    def started(self, claimed: Claimed, at: float) -> None:
        if self.wanted and not claimed.told_started:
            claimed.told_started = True
            self._tell(TaskStarted, claimed, at=at)

    def told(self, claimed: Claimed, told: Told) -> None:
        """Send a custom event of the task, with the task's fields."""
        if self.wanted:
            self.started(claimed, told.at)
            ours = {"uuid": claimed.headers.id, "retries": claimed.headers.retries}
            fields = msgspec.json.decode(told.fields) | ours
            self.step.tell_fields(told.event_type, fields, at=told.at, blind=told.blind)

    def ended(self, claimed: Claimed, outcome: Outcome) -> None:
        ending = _ENDINGS.get(outcome.kind)
        if self._meters is not None:
            self._measure(self._meters, claimed, outcome)
        if not self.wanted or ending is None:
            return
        self.started(claimed, outcome.started_at)
        at = outcome.started_at + outcome.runtime_s  # the child's word: this process may get it later
        if outcome.kind == "success":
            self._tell(ending, claimed, outcome.summary, outcome.runtime_s, at=at)
        elif outcome.kind in ("failure", "retry"):
            self._tell(ending, claimed, outcome.summary, outcome.traceback, at=at)
        else:
            self._tell(ending, claimed, outcome.kind == "requeued", at=at)

    def failed(self, claimed: Claimed, error: Exception) -> None:
        """For a task that ended without running to its end."""
        self._count(claimed, "failed")
        if self.wanted:
            self._tell(TaskFailed, claimed, repr(error), "")

    def refused(self, headers: TaskHeaders, error: Exception) -> None:
        """For a message that never got into its queue."""
        if self.wanted:
            self.step.tell_task(TaskFailed, time(), headers.id, headers.retries, repr(error), "")

    def revoked(self, claimed: Claimed, *, expired: bool, signal: str = "") -> None:
        self._count(claimed, "revoked")
        if self.wanted:
            self._tell(TaskRevoked, claimed, bool(signal), signal or None, expired)

    def rejected(self, claimed: Claimed, *, requeue: bool) -> None:
        self._count(claimed, "rejected")
        if self.wanted:
            self._tell(TaskRejected, claimed, requeue)

    def _tell(self, of: type[TaskEvent], claimed: Claimed, *values: Any, at: float | None = None) -> None:
        headers = claimed.headers
        self.step.tell_task(of, time() if at is None else at, headers.id, headers.retries, *values)

    def _count(self, claimed: Claimed, end: str) -> None:
        if self._meters is not None:
            self._meters.note_end(self._meters.name(claimed.headers.task), end)

    def _measure(self, meters: "Meters", claimed: Claimed, outcome: Outcome) -> None:
        name = meters.name(claimed.headers.task)
        end = _ENDS.get(outcome.kind)
        if end is not None:
            meters.note_end(name, end)
        if outcome.started_at and claimed.received_at:
            meters.waited(name, outcome.started_at - claimed.received_at)
        if outcome.runtime_s:
            meters.ran(name, outcome.runtime_s)
