"""View: what people read of a task, made from its registers whenever it is asked for.

Each field has one rule that looks at the registers alone, so the view is as independent of the
order of arrival as they are. It is never merged: two views know too little to be joined.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from umbel.events.merge import Registers, count, first_us, winner
from umbel.events.precedence import ENDINGS, state_of
from umbel.events.types import TaskEvent, TaskReceived, TaskSent
from umbel.protocol.delivery.states import PENDING


class TaskRecord(msgspec.Struct, frozen=True, gc=False):
    """One task. Times are Unix seconds; `…_at` is that of the newest attempt that got there.

    `worker` is null while nobody is known to have the task. The error of a task that succeeded is
    the last one it met on its way. `partial`: it was dropped from memory once, so what was told
    before is missing.
    """

    uuid: str
    state: str
    state_at: float | None
    clock: int
    worker: str | None
    name: str | None
    args: str | None
    kwargs: str | None
    root_id: str | None
    parent_id: str | None
    eta: str | None
    expires: str | None
    retries: int
    client: str | None
    queue: str | None
    exchange: str | None
    routing_key: str | None
    result: str | None
    runtime: float | None
    exception: str | None
    traceback: str | None
    terminated: bool | None
    signum: int | str | None
    expired: bool | None
    requeue: bool | None
    sent_at: float | None
    received_at: float | None
    started_at: float | None
    succeeded_at: float | None
    failed_at: float | None
    retried_at: float | None
    revoked_at: float | None
    rejected_at: float | None
    first_sent_at: float | None
    first_received_at: float | None
    first_started_at: float | None
    first_succeeded_at: float | None
    first_failed_at: float | None
    first_retried_at: float | None
    first_revoked_at: float | None
    first_rejected_at: float | None
    n_deliveries: int
    n_terminal: int
    extra: Mapping[str, Any] | None
    partial: bool = False


TIMED = ("sent", "received", "started", "succeeded", "failed", "retried", "revoked", "rejected")


def view(registers: Registers, *, remembered: str | None = None, partial: bool = False) -> TaskRecord:
    """`remembered`: the ending of a task that was dropped since; it stands until one is told."""
    best = winner(registers)
    ended = remembered is not None and (best is None or best.slot not in ENDINGS)
    sent, revoked, rejected = registers.sent, registers.revoked, registers.rejected
    succeeded, error = registers.succeeded, registers.failed or registers.retried
    described = _described(registers)
    return TaskRecord(
        uuid=registers.uuid,
        state=remembered if ended and remembered else PENDING if best is None else state_of(best),
        state_at=None if best is None else seconds(best.at_us),
        clock=0 if best is None else best.clock,
        worker=worker_of(best),
        name=_first(described, "name"),
        args=_first(described, "args"),
        kwargs=_first(described, "kwargs"),
        root_id=_first(described, "root_id"),
        parent_id=_first(described, "parent_id"),
        eta=_first(described, "eta"),
        expires=_first(described, "expires"),
        retries=max((event.retries or 0 for event in registers.events()), default=0),
        client=_of(sent, "hostname"),
        queue=_of(sent, "queue"),
        exchange=_of(sent, "exchange"),
        routing_key=_of(sent, "routing_key"),
        result=_of(succeeded, "result"),
        runtime=_of(succeeded, "runtime"),
        exception=_of(error, "exception"),
        traceback=_of(error, "traceback"),
        terminated=_of(revoked, "terminated"),
        signum=_of(revoked, "signum"),
        expired=_of(revoked, "expired"),
        requeue=_of(rejected, "requeue"),
        n_deliveries=count(registers, "received"),
        n_terminal=sum(count(registers, slot) for slot in ENDINGS),
        extra=None if best is None else best.extra,
        partial=partial,
        **_times(registers),
    )


def worker_of(best: TaskEvent | None) -> str | None:
    return None if best is None or best.slot == "sent" else best.hostname


def name_of(registers: Registers) -> str | None:
    received, sent = registers.received, registers.sent
    if sent is None or received is None:
        only = received or sent
        return None if only is None else only.name
    name: str | None = _first(_described(registers), "name")
    return name


def seconds(at_us: int) -> float:
    return at_us / 1_000_000


def _described(registers: Registers) -> list[TaskReceived | TaskSent]:
    """Those who describe the call, the one of the newest attempt first; the receipt if in doubt."""
    found = [event for event in (registers.received, registers.sent) if event is not None]
    return sorted(found, key=lambda event: -(event.retries or 0))


def _of(event: TaskEvent | None, name: str) -> Any:
    return None if event is None else getattr(event, name)


def _first(described: list[TaskReceived | TaskSent], name: str) -> Any:
    return next((value for event in described if (value := getattr(event, name)) is not None), None)


def _times(registers: Registers) -> dict[str, float | None]:
    times: dict[str, float | None] = {}
    for slot in TIMED:
        held, first = registers.held(slot), first_us(registers, slot)
        times[f"{slot}_at"] = None if held is None else seconds(held.at_us)
        times[f"first_{slot}_at"] = None if first is None else seconds(first)
    return times
