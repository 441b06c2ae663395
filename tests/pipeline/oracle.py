"""What `tasks` says of waiting and running, and every column of `attempts`, by the rules alone.

Written to be compared with the tables, so it shares nothing with their code but the events' digests.
"""

from collections.abc import Iterable
from datetime import datetime
from typing import Any

from tests.events.oracle import STATE, STRENGTH, TERMINAL
from umbel.events.merge import eid
from umbel.events.types import TaskEvent

Newest = dict[str, TaskEvent]
ENDS = ("succeeded", "failed", "revoked", "retried", "rejected")
RUN_MAX_S = 1e12


def order(one: TaskEvent) -> tuple[int, int, int, str, int, int]:
    return (one.retries or 0, one.clock, one.at_us, one.hostname, one.pid, eid(one))


def newest_of(story: Iterable[TaskEvent]) -> Newest:
    return {one.slot: one for one in sorted(story, key=order)}  # the last of a type stays


def attempt_of(one: TaskEvent, received: TaskEvent | None) -> int:
    """Said, or read from the task's newest receipt."""
    if one.retries is not None:
        return one.retries
    last = 0 if received is None else received.retries or 0
    return last if received is None or one.clock >= received.clock else max(0, last - 1)


def rank(one: TaskEvent, attempt: int) -> int:
    if one.slot in TERMINAL:
        return 2**20 + STRENGTH[one.slot]
    return 16 * (attempt + (one.slot == "retried")) + STRENGTH[one.slot]


def task_times(story: Iterable[TaskEvent]) -> dict[str, Any]:
    """wait_s and run_s of a task: of the attempt that started last, and of the one that ended it."""
    newest = newest_of(story)
    received, started = newest.get("received"), newest.get("started")
    best = max(newest.values(), key=lambda one: rank(one, attempt_of(one, received)))
    run_s = _measured(best) if best.slot == "succeeded" else None
    if started is None:
        return {"wait_s": None, "run_s": run_s}
    number = attempt_of(started, received)
    mine = {
        slot: one
        for slot, one in newest.items()
        if slot == "started"
        or (slot == "sent" and (one.retries or 0) == number)
        or (slot == "received" and attempt_of(one, received) == number)
    }
    is_ended = best.slot in TERMINAL and attempt_of(best, received) == number
    if run_s is None and is_ended:
        run_s = _between(started.at_us, best.at_us)
    return {"wait_s": _wait_s(mine, described(newest, "eta")), "run_s": run_s}


def attempts_of(story: list[TaskEvent]) -> dict[int, dict[str, Any]]:
    """The rows of one task's attempts."""
    whole = newest_of(story)
    received = whole.get("received")
    unsaid = newest_of(one for one in story if one.retries is None)
    strongest = next((slot for slot in TERMINAL if slot in unsaid), None)
    dealt: dict[int, list[TaskEvent]] = {}
    ends: dict[int, set[int]] = {}
    for one in [*(one for one in story if one.retries is not None), *unsaid.values()]:
        dealt.setdefault(attempt_of(one, received), []).append(one)
    for one in story:
        if one.slot in TERMINAL:
            told = one if one.retries is not None else unsaid[str(strongest)]
            ends.setdefault(attempt_of(told, received), set()).add(eid(one))
    takes: dict[int, set[int]] = {}
    for one in story:
        if one.slot == "received":
            told = one if one.retries is not None else unsaid["received"]
            takes.setdefault(attempt_of(told, received), set()).add(eid(one))
    return {
        number: _row(newest_of(events), whole, number)
        | {"n_deliveries": len(takes.get(number, ())), "n_terminal": len(ends.get(number, ()))}
        for number, events in dealt.items()
    }


def _row(newest: Newest, whole: Newest, number: int) -> dict[str, Any]:
    best = max(newest.values(), key=lambda one: rank(one, number))
    end = next((newest[slot] for slot in ENDS if slot in newest), None)
    received, started, sent = (newest.get(slot) for slot in ("received", "started", "sent"))
    told: Any = sent or whole.get("sent")
    asked: Any = newest.get("succeeded")
    erred: Any = newest.get("failed") or newest.get("retried")
    run_s = None if asked is None else _measured(asked)
    if run_s is None and started is not None and end is not None:
        run_s = _between(started.at_us, end.at_us)
    return {
        "state": _state(best),
        "state_at": best.at_us,
        "clock": best.clock,
        "worker": None if best.slot == "sent" else best.hostname,
        "pid": None if best.slot == "sent" else best.pid,
        **{name: _either(newest, whole, name) for name in ("name", "root_id", "parent_id")},
        "queue": next((one.queue for one in _both(sent, whole.get("sent")) if one.queue is not None), None),
        "client": None if told is None else told.hostname,
        **{f"{slot}_at": _at(newest.get(slot)) for slot in ("sent", "received", "started")},
        "ended_at": _at(end),
        "outcome": None if end is None else _state(end),
        "received_clock": None if received is None else received.clock,
        "started_clock": None if started is None else started.clock,
        "ended_clock": None if end is None else end.clock,
        "runtime": None if asked is None else asked.runtime,
        "exception": None if erred is None else erred.exception,
        "out_of_order": any(
            _is_against(one, other) for one, other in ((received, started), (started, end), (received, end))
        ),
        "wait_s": _wait_s(newest, described(newest, "eta")) if started is not None else None,
        "run_s": run_s,
    }


def described(newest: Newest, name: str) -> Any:
    found: list[Any] = [newest[slot] for slot in ("received", "sent") if slot in newest]
    found.sort(key=lambda one: -(one.retries or 0))
    return next((value for one in found if (value := getattr(one, name)) is not None), None)


def _either(newest: Newest, whole: Newest, name: str) -> Any:
    own = described(newest, name)
    return described(whole, name) if own is None else own


def _both(*events: Any) -> list[Any]:
    return [one for one in events if one is not None]


def _state(one: TaskEvent) -> str:
    return STATE.get(one.slot) or one.type_name.removeprefix("task-").upper()


def _at(one: TaskEvent | None) -> int | None:
    return None if one is None else one.at_us


def _wait_s(newest: Newest, eta: str | None) -> float | None:
    sent, received, started = (newest.get(slot) for slot in ("sent", "received", "started"))
    since = None if received is None else received.at_us
    if sent is not None:
        since = max(sent.at_us, -1 if (due := _instant_us(eta)) is None else due)
    return None if since is None or started is None else _between(since, started.at_us)


def _measured(one: Any) -> float | None:
    runtime: float | None = one.runtime
    return runtime if runtime is not None and 0 <= runtime <= RUN_MAX_S else None


def _between(start_us: int, end_us: int) -> float:
    return max(0, end_us - start_us) / 1e6


def _instant_us(text: str | None) -> int | None:
    try:
        return None if text is None else round(datetime.fromisoformat(text).timestamp() * 1e6)
    except ValueError:
        return None


def _is_against(earlier: TaskEvent | None, later: TaskEvent | None) -> bool:
    if earlier is None or later is None or (earlier.hostname, earlier.pid) != (later.hostname, later.pid):
        return False
    return 0 < later.clock < earlier.clock
