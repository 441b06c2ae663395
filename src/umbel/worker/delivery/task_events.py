"""TaskEvents: publishes what happens to each task, while a listener wants it.

Field names and forms are Celery's. Every event has `retries`, which tells the attempts of a task apart.
"""

from collections.abc import Mapping
from time import time
from typing import TYPE_CHECKING, Any

import msgspec

from umbel.events.types import (
    EARLIER_STARTS,
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
from umbel.pools.interface import Outcome, UserEvent
from umbel.wire.call import TaskHeaders
from umbel.wire.event import encoded_fields
from umbel.wire.retried import RETRY_OF, retry_of
from umbel.worker.delivery.claimed import Claimed
from umbel.worker.events import Events

if TYPE_CHECKING:
    from umbel.events.meters import Meters

# By the kind of an outcome: the event, and the name under which the meters count it.
_ENDINGS: Mapping[str, tuple[type[TaskEvent], str]] = {
    "success": (TaskSucceeded, "succeeded"),
    "failure": (TaskFailed, "failed"),
    "retry": (TaskRetried, "retried"),
    "rejected": (TaskRejected, "rejected"),
    "requeued": (TaskRejected, "rejected"),
}


class TaskEvents:
    """`meters`: counts every task, also when no listener wants its events; None: nothing is counted.

    `wanted`: there is a listener. `noted`: that, or tasks are counted; else `received` and `ended` need not
    be called.
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
        """Note when a message was claimed. `task-received` is sent before its first other event.

        So a message that is returned unstarted sends no event, and deliveries are counted by their outcome.
        """
        claimed.received_at = time()
        if self._meters is not None and (claimed.delivery.redelivered or claimed.delivery.starts):
            self._meters.note_repeat(self._meters.name(claimed.headers.task))

    def delivered(self, claimed: Claimed) -> None:
        """Send `task-received`, once."""
        if not self.wanted or claimed.sent_received:
            return
        claimed.sent_received = True
        headers, at = claimed.headers, claimed.received_at or time()
        name = headers.shadow or headers.task
        ids = (headers.root_id, headers.parent_id)
        described = (name, *claimed.shown, *ids, headers.eta, headers.expires)
        more: dict[str, Any] = {}
        if (retried := retry_of(claimed.message.headers)) is not None:
            more[RETRY_OF] = retried
        if isinstance(headers.umbel_starts, int):
            more[EARLIER_STARTS] = headers.umbel_starts
        if not more:
            self.step.send_task(TaskReceived, at, headers.id, headers.retries, *described)
            return
        fields = dict(
            zip(encoded_fields(TaskReceived), (headers.id, headers.retries, *described), strict=True)
        )
        self.step.send_fields(tag_of(TaskReceived), fields | more, at=at)

    def started(self, claimed: Claimed, at: float) -> None:
        """Send `task-started`, once."""
        if self.wanted and not claimed.sent_started:
            claimed.sent_started = True
            self._send(TaskStarted, claimed, at=at)

    def custom(self, claimed: Claimed, custom: UserEvent) -> None:
        """Send an event that the task itself reports, with the task's fields."""
        if self.wanted:
            self.started(claimed, custom.at)
            ours = {"uuid": claimed.headers.id, "retries": claimed.headers.retries}
            fields = msgspec.json.decode(custom.fields) | ours
            self.step.send_fields(custom.event_type, fields, at=custom.at, blind=custom.blind)

    def ended(self, claimed: Claimed, outcome: Outcome) -> None:
        """Measure a run and send the event of its outcome."""
        ending = _ENDINGS.get(outcome.kind)
        if self._meters is not None:
            self._measure(self._meters, claimed, outcome)
        if not self.wanted or ending is None:
            return
        event, _ = ending
        self.started(claimed, outcome.started_at)
        at = outcome.started_at + outcome.runtime_s  # by the child's clock: this process may get it later
        if outcome.kind == "success":
            self._send(event, claimed, outcome.summary, outcome.runtime_s, at=at)
        elif outcome.kind in ("failure", "retry"):
            self._send(event, claimed, outcome.summary, outcome.traceback, at=at)
        else:
            self._send(event, claimed, outcome.kind == "requeued", at=at)

    def failed(self, claimed: Claimed, error: Exception) -> None:
        """Send `task-failed` for a task that did not run to its end."""
        self._count(claimed, "failed")
        if self.wanted:
            self._send(TaskFailed, claimed, repr(error), "")

    def refused(self, headers: TaskHeaders, error: Exception) -> None:
        """Send `task-failed` for a message that its queue refused."""
        if self.wanted:
            self.step.send_task(TaskFailed, time(), headers.id, headers.retries, repr(error), "")

    def revoked(self, claimed: Claimed, *, expired: bool, signal: str = "") -> None:
        """Send `task-revoked`. `signal`: the task was running, and was terminated with that signal."""
        self._count(claimed, "revoked")
        if self.wanted:
            self._send(TaskRevoked, claimed, bool(signal), signal or None, expired)

    def rejected(self, claimed: Claimed, *, requeue: bool) -> None:
        """Send `task-rejected`. `requeue`: the message goes back to its queue."""
        self._count(claimed, "rejected")
        if self.wanted:
            self._send(TaskRejected, claimed, requeue)

    def _send(self, of: type[TaskEvent], claimed: Claimed, *values: Any, at: float | None = None) -> None:
        self.delivered(claimed)
        headers = claimed.headers
        self.step.send_task(of, time() if at is None else at, headers.id, headers.retries, *values)

    def _count(self, claimed: Claimed, end: str) -> None:
        if self._meters is not None:
            self._meters.note_end(self._meters.name(claimed.headers.task), end)

    def _measure(self, meters: "Meters", claimed: Claimed, outcome: Outcome) -> None:
        name = meters.name(claimed.headers.task)
        if (ending := _ENDINGS.get(outcome.kind)) is not None:
            meters.note_end(name, ending[1])
        if outcome.started_at and claimed.received_at:
            meters.waited(name, outcome.started_at - claimed.received_at)
        if outcome.runtime_s:
            meters.ran(name, outcome.runtime_s)
