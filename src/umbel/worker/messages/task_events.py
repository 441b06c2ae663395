"""TaskEvents: the story of each task in events, told only when somebody asked for it.

Field names and forms are Celery's; `retries`, the attempt, is on every one of them, so that
attempts can be told apart.
"""

from time import time
from typing import TYPE_CHECKING, Any

import msgspec

from umbel.pools.interface import Outcome, Told
from umbel.wire.retried import RETRY_OF, retry_of
from umbel.wire.task import TaskHeaders
from umbel.worker.messages.claimed import Claimed
from umbel.worker.steps.events import Events

if TYPE_CHECKING:
    from umbel.events.meters import Meters

_ENDINGS = {
    "success": "task-succeeded",
    "failure": "task-failed",
    "retry": "task-retried",
    "rejected": "task-rejected",
    "requeued": "task-rejected",
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
        args, kwargs = claimed.shown
        retried = retry_of(claimed.message.headers)
        fields: dict[str, Any] = {} if retried is None else {RETRY_OF: retried}
        self._tell(
            "task-received",
            claimed,
            name=headers.shadow or headers.task,
            args=args,
            kwargs=kwargs,
            root_id=headers.root_id,
            parent_id=headers.parent_id,
            eta=headers.eta,
            expires=headers.expires,
            **fields,
        )

    def started(self, claimed: Claimed, at: float) -> None:
        if self.wanted and not claimed.told_started:
            claimed.told_started = True
            self._tell("task-started", claimed, at=at)

    def told(self, claimed: Claimed, told: Told) -> None:
        """Send a custom event of the task, with the task's fields."""
        if self.wanted:
            self.started(claimed, told.at)
            ours = {"uuid": claimed.headers.id, "retries": claimed.headers.retries}
            fields = msgspec.json.decode(told.fields) | ours
            self.step.tell_fields(told.event_type, fields, at=told.at, blind=told.blind)

    def ended(self, claimed: Claimed, outcome: Outcome) -> None:
        event_type = _ENDINGS.get(outcome.kind)
        if self._meters is not None:
            self._measure(self._meters, claimed, outcome)
        if not self.wanted or event_type is None:
            return
        self.started(claimed, outcome.started_at)
        if outcome.kind == "success":
            self._tell(event_type, claimed, result=outcome.summary, runtime=outcome.runtime_s)
        elif outcome.kind in ("failure", "retry"):
            self._tell(event_type, claimed, exception=outcome.summary, traceback=outcome.traceback)
        else:
            self._tell(event_type, claimed, requeue=outcome.kind == "requeued")

    def failed(self, claimed: Claimed, error: Exception) -> None:
        """For a task that ended without running to its end."""
        self._count(claimed, "failed")
        if self.wanted:
            self._tell("task-failed", claimed, exception=repr(error), traceback="")

    def refused(self, headers: TaskHeaders, error: Exception) -> None:
        """For a message that never got into its queue."""
        if self.wanted:
            self.step.tell(
                "task-failed", uuid=headers.id, retries=headers.retries, exception=repr(error), traceback=""
            )

    def revoked(self, claimed: Claimed, *, expired: bool, signal: str = "") -> None:
        self._count(claimed, "revoked")
        if self.wanted:
            self._tell(
                "task-revoked", claimed, terminated=bool(signal), signum=signal or None, expired=expired
            )

    def rejected(self, claimed: Claimed, *, requeue: bool) -> None:
        self._count(claimed, "rejected")
        if self.wanted:
            self._tell("task-rejected", claimed, requeue=requeue)

    def _tell(self, event_type: str, claimed: Claimed, *, at: float | None = None, **fields: Any) -> None:
        self.step.tell(event_type, at=at, uuid=claimed.headers.id, retries=claimed.headers.retries, **fields)

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
