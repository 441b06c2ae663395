"""Precedence: which of a task's events decides what state it is in.

The states have Celery's order of strength, and an ending outranks everything: a late event never moves a
finished task back. Before the end a later attempt outranks an earlier one, whatever its events; a retry
already belongs to the attempt it requests, so it outranks the start it ended and the sending it causes, and
is outranked by the next receipt.

No two registers of a task have the same rank: strengths differ from type to type and stay below the step
between two attempts. So the highest rank names one winner.

An event without an attempt (Celery's workers omit it after the receipt) counts for the attempt that was
received last, if its clock is not before that receipt, otherwise for the attempt before. This is an
interpretation, made when the state is read: with two attempts whose receipts were not both received, or a
sender whose clock began again at 0, it can be the wrong attempt.
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
"""The state that each register stands for; a custom event names its state."""

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
"""Above the rank of every attempt that is counted (`types.RETRIES_MAX`)."""


def state_of(event: TaskEvent) -> str:
    """Return the state that an event puts its task in."""
    return event.subject.upper() if isinstance(event, TaskCustom) else STATES[event.slot]


def attempt_of(event: TaskEvent, received: TaskReceived | None) -> int:
    """Return the attempt that an event belongs to, as stated or derived from the receipt."""
    if event.retries is not None:
        return event.retries
    if received is None:
        return 0
    newest = received.retries or 0
    return newest if event.clock >= received.clock else max(0, newest - 1)


def rank(event: TaskEvent, received: TaskReceived | None) -> int:
    """Return the rank of an event among its task's; the highest decides the state."""
    slot, attempt = event.slot, event.retries
    if slot in ENDINGS:
        return ENDED + STRENGTHS[slot]
    if attempt is None:
        attempt = attempt_of(event, received)
    epoch = attempt + 1 if slot == "retried" else attempt
    return ATTEMPT_STEP * epoch + STRENGTHS[slot]
