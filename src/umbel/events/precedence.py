"""Precedence: which of a task's events decides the task's state.

States have the same order of strength as in Celery, and an ending outranks everything else: a late event
never moves a finished task back. Before the end, events of a later attempt outrank those of an earlier one. A
retry event belongs to the attempt that it requests. So it outranks the start before it and the sending that
it causes, and the next receipt outranks it.

No two registers of a task have the same rank: each type has a different strength, and all strengths are
smaller than the step between two attempts. So exactly one event wins.

Celery's workers state the attempt only on receipt. An event without an attempt counts for the attempt that
was received last, if its clock is not before that receipt, otherwise for the attempt before. This is a guess,
made when the state is read. It can be wrong if one of two receipts was lost, or if the sender's clock was
reset to 0.
"""

from collections.abc import Mapping

from umbel.events.types import TaskCustom, TaskEvent, TaskReceived
from umbel.protocol.delivery.states import FAILURE, PENDING, RECEIVED, RETRY, REVOKED, STARTED, SUCCESS

REJECTED = "REJECTED"

STATES: Mapping[str, str] = {
    "sent": PENDING,
    "received": RECEIVED,
    "started": STARTED,
    "succeeded": SUCCESS,
    "failed": FAILURE,
    "retried": RETRY,
    "revoked": REVOKED,
    "rejected": REJECTED,
}
"""The state for each register; a custom event names its state."""

STRENGTHS: Mapping[str, int] = {
    "succeeded": 8,
    "failed": 7,
    "custom": 6,
    "revoked": 5,
    "started": 4,
    "received": 3,
    "rejected": 2,
    "retried": 1,
    "sent": 0,
}

ENDINGS = frozenset({"succeeded", "failed", "revoked"})
ATTEMPT_STEP = 16
ENDED = 2**20
"""Higher than the rank of every attempt that is counted (`types.RETRIES_MAX`)."""


def state_of(event: TaskEvent) -> str:
    """Return the task state that an event stands for."""
    return event.subject.upper() if isinstance(event, TaskCustom) else STATES[event.slot]


def attempt_of(event: TaskEvent, received: TaskReceived | None) -> int:
    """Return the attempt that an event belongs to: the stated one, or one derived from the receipt."""
    if event.retries is not None:
        return event.retries
    if received is None:
        return 0
    newest = received.retries or 0
    return newest if event.clock >= received.clock else max(0, newest - 1)


def rank(event: TaskEvent, received: TaskReceived | None) -> int:
    """Return the rank of an event among the events of its task; the highest rank decides the state."""
    slot, attempt = event.slot, event.retries
    if slot in ENDINGS:
        return ENDED + STRENGTHS[slot]
    if attempt is None:
        attempt = attempt_of(event, received)
    epoch = attempt + 1 if slot == "retried" else attempt
    return ATTEMPT_STEP * epoch + STRENGTHS[slot]
