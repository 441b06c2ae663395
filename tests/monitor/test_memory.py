"""Events of megabytes, in every field that a sender can fill: what a monitor remembers of them is small."""

import os
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest

from umbel.events.state import EVENT_MAX_BYTES, NAME_MAX, TEXT_MAX, bounded
from umbel.monitor import model as models
from umbel.monitor.model import ClusterModel
from umbel.wire.event import encode_event, encode_events

NOW = 1_790_000_000.0
SOAK = bool(os.environ.get("UMBEL_SOAK"))
EVENTS = 100 if SOAK else 40
SHORT_EVENTS = 500 if SOAK else 200
BIG = 1_000_000
MEMORY_MAX = EVENTS * 160_000


def event(number: int, type_name: str = "task-received", **fields: Any) -> dict[str, Any]:
    told = {"type": type_name, "hostname": "w@h", "pid": 1, "clock": number + 1, "timestamp": NOW + number}
    return {**told, "uuid": f"t{number}", "retries": 0, "name": "pay", **fields}


def large(number: int) -> str:
    return f"{number}".ljust(BIG, "x")


FIELDS: dict[str, Callable[[int], dict[str, Any]]] = {
    "args": lambda n: event(n, args=large(n), kwargs=large(n)),
    "an id": lambda n: event(n, uuid=large(n)),
    "a root": lambda n: event(n, root_id=large(n), parent_id=large(n)),
    "a name": lambda n: event(n, name=large(n)),
    "a node": lambda n: event(n, hostname=large(n)),
    "a queue": lambda n: event(n, "task-sent", queue=large(n), routing_key=large(n)),
    "an error": lambda n: event(n, "task-failed", exception=large(n), traceback=large(n)),
    "a type": lambda n: event(n, f"task-{large(n)}"),
    "another type": lambda n: event(n, f"worker-{large(n)}"),
    "a field of the sender's": lambda n: event(n, more=large(n)),
    "a list of the sender's": lambda n: event(n, "task-progress", more=[large(n)]),
    "many fields": lambda n: event(n, **{f"{n}-{place}": "x" * 900 for place in range(1000)}),
    "many numbers": lambda n: event(n, more=[10**400] * 2000),
    "a heartbeat": lambda n: event(n, "worker-heartbeat", hostname=f"w{n}@h", sw_ident=large(n)),
    "an election": lambda n: event(n, "worker-elect", id=f"e{n}", topic=large(n), action={"a": large(n)}),
    "a lease": lambda n: event(n, "worker-leader", lease=large(n), leader=large(n), term=1, phase="acquired"),
    "a moment": lambda n: event(n, "control-mark", text=large(n)),
    "a retry": lambda n: event(n, retry_of=large(n)),
}


def remembered(bodies: list[bytes], model: ClusterModel) -> int:
    """How many bytes the model needs for what is in these messages."""
    tracemalloc.start()
    try:
        for body in bodies:
            model.take(body, NOW)
        assert model.state.counts is not None
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("field", FIELDS)
def test_large_events_take_little_room(field: str) -> None:
    """A megabyte in each, each alone and all of them with others in lists."""
    model = ClusterModel()
    bodies = [encode_event(FIELDS[field](number)) for number in range(EVENTS)]
    bodies += [encode_events([FIELDS[field](number), event(number)]) for number in range(EVENTS, EVENTS + 5)]
    assert remembered(bodies, model) < MEMORY_MAX
    assert model.dropped + model.state.heard == EVENTS + 10


def test_many_events_of_the_largest_size_stay_within_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "STORIES_BYTES_MAX", 2 * 2**20)
    model = ClusterModel()
    model.state.bytes_max = 4 * 2**20
    text = "x" * TEXT_MAX
    bodies = [encode_event(event(number, args=text, kwargs=text)) for number in range(1000)]
    assert remembered(bodies, model) < 10 * 2**20
    assert 50 < len(model.state) < 110 and 20 < len(model._stories) < 60
    assert "t999" in model.state


PARTS: dict[str, Callable[[int], dict[str, Any]]] = {
    "empty lists": lambda n: event(n, more=[[]] * 2000),
    "empty maps": lambda n: event(n, more=[{}] * 2000),
    "numbers": lambda n: event(n, more=[n + 0.5] * 3000),
    "maps of an entry": lambda n: event(n, more=[{"a": 1}] * 1000),
    "fields": lambda n: event(n) | {f"{n}-{place}": 1 for place in range(500)},
    "few lists each": lambda n: event(n, more=[[]] * 100),
}


@pytest.mark.parametrize("parts", PARTS)
def test_what_is_short_in_a_message_and_large_in_memory_is_counted_as_it_is_in_memory(
    monkeypatch: pytest.MonkeyPatch, parts: str
) -> None:
    """An empty list has 3 bytes in a message, and 64 here."""
    monkeypatch.setattr(models, "STORIES_BYTES_MAX", 2**20)
    model = ClusterModel()
    model.state.bytes_max = 4 * 2**20
    bodies = [encode_event(PARTS[parts](number)) for number in range(SHORT_EVENTS)]
    assert remembered(bodies, model) < 8 * 2**20
    assert model.dropped == 0 and f"t{SHORT_EVENTS - 1}" in model.state


def test_a_worker_says_little_of_itself() -> None:
    """Workers are counted, and not their bytes: of each the newest events are remembered."""
    model = ClusterModel()
    beats = [
        event(n, kind, hostname=f"w{n}@h", more=[[]] * 100)
        for kind in ("worker-online", "worker-heartbeat", "worker-offline")
        for n in range(100)
    ]
    assert remembered([encode_event(beat) for beat in beats], model) < 2**17
    assert model.dropped == 300 and len(model.state.workers) == 0
    usual = event(1, "worker-heartbeat", freq=2.0, active=1, processed=5, loadavg=[0.1, 0.2, 0.3], sw_ver="5")
    model.take(encode_event(usual), NOW)
    assert model.dropped == 300 and len(model.state.workers) == 1


def test_a_text_is_cut_and_an_identity_is_not() -> None:
    cut, _ = bounded(
        event(1, args="a" * (TEXT_MAX + 1), name="n" * (NAME_MAX + 1), note="m" * (NAME_MAX + 1))
    )
    assert cut is not None
    assert cut["args"] == "a" * TEXT_MAX + "…" and cut["name"] == "n" * NAME_MAX + "…"
    whole, size = bounded(event(1))
    assert whole == event(1) and size < 1000
    assert bounded(event(1, uuid="u" * (NAME_MAX + 1)))[0] is None
    assert bounded(event(1, "task-" + "t" * NAME_MAX))[0] is None
    assert bounded(event(1, more=["x" * EVENT_MAX_BYTES]))[0] is None
