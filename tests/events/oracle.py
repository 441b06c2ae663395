"""The view, computed from a task's timeline by the table alone, without registers.

Written to be compared with the code, so it shares nothing with it but the events and their digests.
"""

from typing import Any

from umbel.events.merge import eid
from umbel.events.types import TaskEvent
from umbel.events.view import TaskRecord

STRENGTH = {
    "succeeded": 8, "failed": 7, "custom": 6, "revoked": 5, "started": 4, "received": 3, "rejected": 2,
    "retried": 1, "sent": 0,
}  # fmt: skip
STATE = {
    "succeeded": "SUCCESS", "failed": "FAILURE", "revoked": "REVOKED", "started": "STARTED",
    "received": "RECEIVED", "rejected": "REJECTED", "retried": "RETRY", "sent": "PENDING",
}  # fmt: skip
TERMINAL = ("succeeded", "failed", "revoked")
TIMED = ("sent", "received", "started", "succeeded", "failed", "retried", "revoked", "rejected")
DESCRIBED = ("name", "args", "kwargs", "root_id", "parent_id", "eta", "expires")


def view_of(story: list[TaskEvent]) -> TaskRecord:
    def place(one: TaskEvent) -> tuple[int, int, int, str, int, int]:
        return (one.retries or 0, one.clock, one.at_us, one.hostname, one.pid, eid(one))

    newest = {one.slot: one for one in sorted(story, key=place)}  # the last of a type stays
    received, sent = newest.get("received"), newest.get("sent")

    def rank(one: TaskEvent) -> tuple[int, int, int, str, int]:
        attempt = one.retries
        if attempt is None:
            last = (received.retries or 0) if received else 0
            attempt = last if received is None or one.clock >= received.clock else max(0, last - 1)
        epoch = attempt + (one.slot == "retried")
        strength = STRENGTH[one.slot]
        ranked = 2**20 + strength if one.slot in TERMINAL else 16 * epoch + strength
        return (ranked, one.clock, one.at_us, one.hostname, one.pid)

    best = max(newest.values(), key=rank)
    describing: list[Any] = [one for one in (received, sent) if one is not None]
    if sent and received and (sent.retries or 0) > (received.retries or 0):
        describing.reverse()

    def of(slot: str, name: str) -> Any:
        return getattr(newest[slot], name) if slot in newest else None

    def described(name: str) -> Any:
        values = [getattr(one, name) for one in describing]
        return next((value for value in values if value is not None), None)

    error = "failed" if "failed" in newest else "retried"
    times: dict[str, Any] = {
        f"{slot}_at": newest[slot].at_us / 1e6 if slot in newest else None for slot in TIMED
    }
    firsts = {
        f"first_{slot}_at": min((one.at_us for one in story if one.slot == slot), default=None)
        for slot in TIMED
    }
    seconds: dict[str, Any] = {name: None if at is None else at / 1e6 for name, at in firsts.items()}
    return TaskRecord(
        uuid=best.uuid,
        state=STATE[best.slot] if best.slot in STATE else best.type_name.removeprefix("task-").upper(),
        state_at=best.at_us / 1e6,
        clock=best.clock,
        worker=None if best.slot == "sent" else best.hostname,
        retries=max(one.retries or 0 for one in newest.values()),
        client=of("sent", "hostname"),
        queue=of("sent", "queue"),
        exchange=of("sent", "exchange"),
        routing_key=of("sent", "routing_key"),
        result=of("succeeded", "result"),
        runtime=of("succeeded", "runtime"),
        exception=of(error, "exception"),
        traceback=of(error, "traceback"),
        terminated=of("revoked", "terminated"),
        signum=of("revoked", "signum"),
        expired=of("revoked", "expired"),
        requeue=of("rejected", "requeue"),
        n_deliveries=len({eid(one) for one in story if one.slot == "received"}),
        n_terminal=len({eid(one) for one in story if one.slot in TERMINAL}),
        extra=best.extra,
        **{name: described(name) for name in DESCRIBED},
        **times,
        **seconds,
    )
