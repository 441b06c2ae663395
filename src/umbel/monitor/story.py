"""Story: one task as a space-time diagram: its events on the lanes of processes, and which caused which.

Within one process events follow one another. Between processes there is one arrow for each delivery: from
what made the message wait (its sending, the retry before, the receipt that was given up) to its receipt. A
receipt that is not the first of its attempt is a repeat: the message was redelivered.
"""

from collections.abc import Sequence

import msgspec

from umbel.events.precedence import ENDINGS, state_of
from umbel.events.types import TaskEvent, TaskReceived, TaskSent
from umbel.monitor.shapes import Attempt, StoryEvent

DETAIL_MAX = 300
_DETAILS = ("exception", "result", "queue", "name")
INTERRUPTED = "INTERRUPTED"  # nobody told of its end, and the message was delivered again
_ENDS = ENDINGS | {"retried", "rejected"}


def story_of(events: Sequence[TaskEvent]) -> tuple[list[StoryEvent], list[tuple[int, int]], list[Attempt]]:
    """Dots, arrows between them, and attempts, from the events in causal order."""
    deliveries = _deliveries(events)
    dots = [
        StoryEvent(
            type=event.type_name,
            at=event.timestamp,
            clock=event.clock,
            node=event.hostname,
            pid=event.pid,
            process=f"client {event.hostname}" if isinstance(event, TaskSent) else event.hostname,
            attempt=event.retries,
            delivery=number,
            repeat=repeat,
            detail=_detail(event),
        )
        for event, (number, repeat) in zip(events, deliveries, strict=True)
    ]
    return dots, _edges(events), _attempts(events, deliveries)


def _deliveries(events: Sequence[TaskEvent]) -> list[tuple[int, str]]:
    """For each event the delivery that it belongs to, from 1 (0: before any), and why that is a repeat."""
    found: list[tuple[int, str]] = []
    number, repeat = 0, ""
    given_up: TaskEvent | None = None
    for event in events:
        if isinstance(event, TaskReceived):
            number += 1
            if number > 1:
                repeat = "retried" if given_up is not None and given_up.slot == "retried" else "redelivered"
        found.append((number, repeat))
        if event.slot != "sent":
            given_up = event
    return found


def _edges(events: Sequence[TaskEvent]) -> list[tuple[int, int]]:
    edges: list[tuple[int, int]] = []
    last: dict[str, int] = {}
    for index, event in enumerate(events):
        if isinstance(event, TaskReceived):
            cause = _cause(events, index)
            if cause is not None:
                edges.append((cause, index))
        lane = f"client {event.hostname}" if isinstance(event, TaskSent) else event.hostname
        if lane in last and not isinstance(event, TaskReceived):
            edges.append((last[lane], index))
        last[lane] = index
    return edges


def _cause(events: Sequence[TaskEvent], index: int) -> int | None:
    """What made the message wait that was received: the newest event before it that can have."""
    for before in range(index - 1, -1, -1):
        if events[before].slot in ("sent", "retried", "received", "started"):
            return before
    return None


def _attempts(events: Sequence[TaskEvent], deliveries: Sequence[tuple[int, str]]) -> list[Attempt]:
    attempts: list[Attempt] = []
    waits_since: float | None = None
    for number in sorted({number for number, _ in deliveries}):
        own = [event for event, (of, _) in zip(events, deliveries, strict=True) if of == number]
        if number:
            repeat = next(why for of, why in deliveries if of == number)
            found = _attempt(number, repeat, own, waits_since)
            is_over = found.ended_at is None and number < deliveries[-1][0]
            attempts.append(msgspec.structs.replace(found, state=INTERRUPTED) if is_over else found)
        queued = [event.timestamp for event in own if event.slot in ("sent", "retried")]
        waits_since = queued[-1] if queued else waits_since
    return attempts


def _attempt(number: int, repeat: str, own: Sequence[TaskEvent], waits_since: float | None) -> Attempt:
    at = {event.slot: event.timestamp for event in own}
    ends = [event for event in own if event.slot in _ENDS]
    ended_at = ends[-1].timestamp if ends else None
    started_at = at.get("started")
    began = waits_since if waits_since is not None else at.get("received")
    last = ends[-1] if ends else own[-1]
    runtime = getattr(last, "runtime", None)
    if runtime is None and ended_at is not None and started_at is not None:
        runtime = max(0.0, ended_at - started_at)
    return Attempt(
        attempt=max((event.retries or 0 for event in own), default=0),
        delivery=number,
        node=last.hostname,
        state=state_of(last),
        received_at=at.get("received"),
        started_at=started_at,
        ended_at=ended_at,
        wait_s=None if started_at is None or began is None else max(0.0, started_at - began),
        run_s=runtime,
        repeat=repeat,
        error=(getattr(last, "exception", None) or "")[:DETAIL_MAX],
    )


def _detail(event: TaskEvent) -> str:
    found = next((value for one in _DETAILS if (value := getattr(event, one, None)) is not None), "")
    return str(found)[:DETAIL_MAX]
