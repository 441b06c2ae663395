"""TaskEvents: the story of each task in events, told only when somebody asked for it.

Field names and forms are Celery's; `retries`, the attempt, is on every one of them, so that
attempts can be told apart.
"""

from typing import Any

import msgspec

from umbel.pools.interface import Outcome, Told
from umbel.wire.task import TaskHeaders
from umbel.worker.messages.claimed import Claimed
from umbel.worker.steps.events import Events

_ENDINGS = {
    "success": "task-succeeded",
    "failure": "task-failed",
    "retry": "task-retried",
    "rejected": "task-rejected",
    "requeued": "task-rejected",
}


class TaskEvents:
    def __init__(self, events: Events) -> None:
        self._events = events

    @property
    def wanted(self) -> bool:
        return self._events.task_events

    async def logged(self) -> None:
        await self._events.logged()

    def received(self, claimed: Claimed) -> None:
        if not self.wanted:
            return
        headers = claimed.headers
        args, kwargs = claimed.shown
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
        )

    def started(self, claimed: Claimed, at: float) -> None:
        if self.wanted and not claimed.told_started:
            claimed.told_started = True
            self._tell("task-started", claimed, at=at)

    def told(self, claimed: Claimed, told: Told) -> None:
        """What the task itself says, in fields of its own."""
        if self.wanted:
            self.started(claimed, told.at)
            ours = {"uuid": claimed.headers.id, "retries": claimed.headers.retries}
            fields = msgspec.json.decode(told.fields) | ours
            self._events.tell_fields(told.event_type, fields, at=told.at, blind=told.blind)

    def ended(self, claimed: Claimed, outcome: Outcome) -> None:
        event_type = _ENDINGS.get(outcome.kind)
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
        if self.wanted:
            self._tell("task-failed", claimed, exception=repr(error), traceback="")

    def refused(self, headers: TaskHeaders, error: Exception) -> None:
        """For a message that never got into its queue."""
        if self.wanted:
            self._events.tell(
                "task-failed", uuid=headers.id, retries=headers.retries, exception=repr(error), traceback=""
            )

    def revoked(self, claimed: Claimed, *, expired: bool, signal: str = "") -> None:
        if self.wanted:
            self._tell(
                "task-revoked", claimed, terminated=bool(signal), signum=signal or None, expired=expired
            )

    def rejected(self, claimed: Claimed, *, requeue: bool) -> None:
        if self.wanted:
            self._tell("task-rejected", claimed, requeue=requeue)

    def _tell(self, event_type: str, claimed: Claimed, *, at: float | None = None, **fields: Any) -> None:
        self._events.tell(
            event_type, at=at, uuid=claimed.headers.id, retries=claimed.headers.retries, **fields
        )
