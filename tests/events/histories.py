"""Histories for tests of the merge: what workers of either kind could tell of a few tasks.

Numbers are drawn from so few that ties are common: two events of one clock, one time, one sender,
even of one everything except a field. `retries` is missing on most events of a Celery node.
"""

import os
from typing import Any

from hypothesis import strategies as st

Wire = dict[str, Any]
EXAMPLES = 2000 if os.environ.get("UMBEL_SOAK") else 50

TASKS = ("t1", "t2", "t3")
NODES = (("u1@a", 1, False), ("u1@a", 2, False), ("u2@b", 1, False), ("c1@c", 7, True), ("c2@d", 8, True))
"""(node, process, whether it is Celery's): u1@a restarts."""

DESCRIPTION = ("name", "args", "kwargs", "root_id", "parent_id", "eta", "expires")


def event(kind: str, uuid: str = "t1", **fields: Any) -> Wire:
    """One event of the wire, with what is not said filled in."""
    told = {"type": f"task-{kind}", "uuid": uuid, "hostname": "u1@a", "pid": 1, "clock": 1, "timestamp": 1.0}
    return told | fields


def told_by(node: tuple[str, int, bool], kind: str, uuid: str, attempt: int, **fields: Any) -> Wire:
    """As a node of that kind tells it: Celery's workers say the attempt on receipt only."""
    hostname, pid, is_celery = node
    said = {} if is_celery and kind not in ("sent", "received") else {"retries": attempt}
    return event(kind, uuid, hostname=hostname, pid=pid, **said, **fields)


RUN = ("received", "started", "succeeded")


def attempt(number: int, *kinds: str, clock: int = 0, **fields: Any) -> list[Wire]:
    return [
        event(kind, retries=number, clock=clock + step, timestamp=float(clock + step), **fields)
        for step, kind in enumerate(kinds, start=1)
    ]


ORDER_DEPENDENT_IN_CELERY: dict[str, tuple[list[Wire], str]] = {
    "sent, received, started, succeeded": (attempt(0, "sent", *RUN), "SUCCESS"),
    "sent and received differ in args": (
        [
            event("sent", args="(1,)", retries=0),
            event("received", args="(2,)", clock=2),
            event("started", clock=3),
        ],
        "STARTED",
    ),
    "a retry that succeeds": (
        [*attempt(0, "received", "started", "retried"), *attempt(1, *RUN, clock=3)],
        "SUCCESS",
    ),
    "received, started, retried": (attempt(0, "received", "started", "retried"), "RETRY"),
    "two deliveries, two successes": (
        [
            *attempt(0, "received", "succeeded"),
            *attempt(0, "received", "succeeded", clock=5, hostname="u2@b"),
        ],
        "SUCCESS",
    ),
    "received, rejected": (attempt(0, "received", "rejected"), "RECEIVED"),
}
"""Histories of which Celery's state has several answers, by the order of arrival; and ours."""


_texts = st.sampled_from([None, "a", "b"])
_description = {
    **dict.fromkeys(DESCRIPTION, _texts),
    "eta": st.sampled_from([None, "a", "1970-01-01T00:00:01.400000+00:00"]),
}
_fields: dict[str, st.SearchStrategy[dict[str, Any]]] = {
    "sent": st.fixed_dictionaries({**_description, "queue": _texts, "routing_key": _texts}),
    "received": st.fixed_dictionaries(_description),
    "started": st.just({}),
    "succeeded": st.fixed_dictionaries(
        {"result": _texts, "runtime": st.sampled_from([None, 0.5, 2.0, -1.0])}
    ),
    "failed": st.fixed_dictionaries({"exception": _texts, "traceback": _texts}),
    "retried": st.fixed_dictionaries({"exception": _texts, "traceback": _texts}),
    "revoked": st.fixed_dictionaries(
        {"terminated": st.booleans(), "signum": st.sampled_from([None, 9, "TERM"])}
    ),
    "rejected": st.fixed_dictionaries({"requeue": st.booleans()}),
    "progress": st.fixed_dictionaries({"done": st.sampled_from([1, 2])}),
    "paused": st.just({}),
}
_endings = st.sampled_from(["succeeded", "failed", "revoked", "rejected", "retried", "progress", None])
_stamps: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {"clock": st.integers(0, 6), "timestamp": st.sampled_from([1.0, 1.5, 2.0000001, 2.0000002, 3.0])}
)


@st.composite
def loose_events(draw: st.DrawFn) -> Wire:
    """Any event of any type, as it may come without the others around it."""
    kind = draw(st.sampled_from(sorted(_fields)))
    fields = {**draw(_fields[kind]), **draw(_stamps)}
    told = told_by(
        draw(st.sampled_from(NODES)), kind, draw(st.sampled_from(TASKS)), draw(st.integers(0, 3)), **fields
    )
    if draw(st.integers(0, 3)) == 0:  # some sender says it nowhere
        told.pop("retries", None)
    return told


@st.composite
def stories(draw: st.DrawFn) -> list[Wire]:
    """One task, told in order: attempts, each delivered up to twice, with clocks that grow or restart."""
    uuid = draw(st.sampled_from(TASKS))
    clock, at, told = draw(st.integers(0, 4)), 1.0, list[Wire]()
    for attempt in range(draw(st.integers(1, 3))):
        sent = {**draw(_fields["sent"]), "timestamp": at, "clock": attempt + 1}
        told.append(told_by(("gen1@z", 9, False), "sent", uuid, attempt, **sent))
        for _ in range(draw(st.integers(0, 2))):
            node = draw(st.sampled_from(NODES))
            kinds = ["received", "started", draw(_endings)]
            for kind in kinds[: draw(st.integers(1, 3))]:
                if kind is not None:
                    clock, at = clock + draw(st.integers(0, 2)), at + 0.25
                    fields = draw(_fields[kind])
                    told.append(told_by(node, kind, uuid, attempt, clock=clock, timestamp=at, **fields))
            if draw(st.booleans()):
                clock = 0  # a node restarted without its clock
    return told


@st.composite
def beats(draw: st.DrawFn) -> Wire:
    hostname, pid, _ = draw(st.sampled_from(NODES))
    kind = draw(st.sampled_from(["online", "heartbeat", "offline"]))
    return {
        "type": f"worker-{kind}",
        "hostname": hostname,
        "pid": pid,
        "freq": draw(st.sampled_from([None, 2.0, 5])),
        "active": draw(st.integers(0, 1)),
        **draw(_stamps),
    }


def histories() -> st.SearchStrategy[list[Wire]]:
    """Stories of several tasks, loose events between them, heartbeats; nothing in any order."""
    told = st.lists(stories(), max_size=4).map(lambda many: [one for story in many for one in story])
    loose = st.lists(st.one_of(loose_events(), beats()), max_size=12)
    return st.tuples(told, loose).map(lambda both: both[0] + both[1])
