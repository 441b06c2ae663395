"""A running task that has another signature run in its place, or adds a part to its chord."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from umbel import App, Task, chain, chord, group
from umbel.app.canvas.signature import Signature
from umbel.app.running.tracer import Tracer
from umbel.errors import ChordError, ConfigurationError
from umbel.pools.interface import Job
from umbel.wire.call import decode_task

eager_app = App("replacing", broker="sqlite:////nowhere/replacing.db")
told: list[Any] = []


@eager_app.task
def add(x: int, y: int) -> int:
    return x + y


@eager_app.task
def total(numbers: list[int]) -> int:
    return sum(numbers)


@eager_app.task
def same(value: Any) -> Any:
    return value


@eager_app.task
def fail() -> None:
    raise ValueError("no")


@eager_app.task
def tell(value: Any) -> None:
    told.append(value)


@eager_app.task(bind=True)
def nesting(self: Task[..., Any]) -> int:
    return self.request.replaced_task_nesting


@eager_app.task(bind=True)
def becomes(self: Task[..., Any], what: str) -> Any:
    self.replace(REPLACEMENTS[what]())


REPLACEMENTS: dict[str, Any] = {
    "task": lambda: add.s(1, 2),
    "group": lambda: group(add.s(1, 2), add.s(3, 4)),
    "group of one": lambda: group(add.s(1, 2)),
    "chain": lambda: chain(add.s(1, 2), add.s(10)),
    "chain to a group": lambda: chain(add.s(1, 2), group(add.s(1), add.s(2))),
    "chord": lambda: chord([add.s(1, 2), add.s(3, 4)], total.s()),
    "failure": fail.si,
    "another that is replaced": lambda: becomes.s("task"),
    "nesting": nesting.s,
    "nesting of a chain": lambda: chain(same.s(1), nesting.si()),
    "nested nesting": lambda: becomes.s("nesting"),
    "empty chain": chain,
    "part": lambda: add.s(1, 2).set(chord=total.s().to_map()),
}


@pytest.mark.parametrize(
    ("what", "value"),
    [
        ("task", 3),
        ("group", [3, 7]),
        ("group of one", [3]),
        ("chain", 13),
        ("chain to a group", [4, 5]),
        ("chord", 10),
        ("another that is replaced", 3),
        ("nesting", 1),
        ("nesting of a chain", 1),
        ("nested nesting", 2),
    ],
)
def test_who_waits_for_a_task_is_given_what_its_replacement_returns(what: str, value: object) -> None:
    with eager_app.eager():
        assert becomes.delay(what).get(timeout=0) == value
        assert (becomes.s(what) | same.s()).delay().get(timeout=0) == value
        assert group(becomes.s(what), same.s(1)).delay().get(timeout=0) == [value, 1]
        assert chord([becomes.s(what), same.s(1)], same.s()).delay().get(timeout=0) == [value, 1]
        assert chord([becomes.s(what) | same.s(), same.s(1)], same.s()).delay().get(timeout=0) == [value, 1]


def test_callbacks_and_errbacks_are_those_of_the_task_that_was_replaced() -> None:
    told.clear()
    with eager_app.eager():
        becomes.apply_async(("chain",), link=tell.s())
        failed = becomes.apply_async(("failure",), link_error=tell.s())
        with pytest.raises(ValueError, match="no"):
            failed.get(timeout=0)
    assert told == [13, failed.id]


def test_a_part_whose_replacement_fails_fails_its_chord() -> None:
    with eager_app.eager(), pytest.raises(ChordError, match=r"ValueError\('no'\)"):
        chord([becomes.s("failure"), same.s(1)], total.s()).delay().get(timeout=0)


@pytest.mark.parametrize(
    ("what", "problem"), [("empty chain", "an empty chain"), ("part", "must not be part of a chord")]
)
def test_a_replacement_that_cannot_be_is_refused(what: str, problem: str) -> None:
    with eager_app.eager(), pytest.raises(ConfigurationError, match=problem):
        becomes.delay(what).get(timeout=0)


def test_only_a_task_that_came_as_a_message_can_be_replaced() -> None:
    with pytest.raises(RuntimeError, match="called as a function"):
        becomes("task")


@pytest.fixture
def stored(tmp_path: Path) -> Iterator[App]:
    app = App("replacing", broker=f"sqlite:///{tmp_path}/umbel.db")

    @app.task(name="leaf")
    def leaf(value: int) -> int:
        return value

    @app.task(bind=True, name="swaps")
    def swaps(self: Task[..., Any]) -> None:
        self.replace(leaf.s(5).set(queue="other"))

    @app.task(bind=True, name="brings")
    def brings(self: Task[..., Any], *numbers: int) -> int:
        for number in numbers:
            self.add_to_chord(leaf.s(number))
        return 0

    yield app
    app.close()


def test_a_replacement_is_sent_in_the_step_that_settles_its_task(stored: App) -> None:
    """A crash in between repeats the task; it never loses what comes after it."""
    prepared = stored.prepare("swaps", (), {}, {})
    job = Job(1, "swaps", prepared.task_id, "celery", prepared.outgoing.message)
    outcome = Tracer(stored, hostname="w@host")(job)
    assert (outcome.kind, list(outcome.results)) == ("ignored", [])
    (sent,) = outcome.follow_ups
    call = decode_task(sent.message)
    assert (sent.queue, call.headers.id, call.headers.task) == ("other", job.task_id, "leaf")
    assert call.headers.replaced_task_nesting == 1


# ---- add_to_chord -------------------------------------------------------------------------------------


@eager_app.task(bind=True)
def brings(self: Task[..., Any], *numbers: int) -> int:
    for number in numbers:
        self.add_to_chord(same.s(number))
    return 0


@eager_app.task(bind=True)
def brings_later(self: Task[..., Any]) -> int:
    added: Signature[Any] = self.add_to_chord(same.s(7), lazy=True)
    added.delay()
    return 0


def test_a_chord_waits_for_parts_that_were_added() -> None:
    with eager_app.eager():
        assert chord([brings.s(10, 20), same.s(1)], total.s()).delay().get(timeout=0) == 31
        assert chord([brings_later.s(), same.s(1)], total.s()).delay().get(timeout=0) == 8


def test_a_task_that_is_redelivered_adds_the_same_parts(stored: App) -> None:
    """N1: or the chord would wait for parts that nobody sends."""
    whole = chord([stored.tasks["brings"].s(10, 20)], stored.tasks["leaf"].s())
    (part,) = whole.prepare()
    sent: list[str] = []
    stored.signals.before_task_publish.connect(lambda **facts: sent.append(facts["task_id"]))
    job = Job(1, "brings", part.task_id, "celery", part.outgoing.message)
    tracer = Tracer(stored, hostname="w@host")
    assert [tracer(job).kind, tracer(job).kind] == ["success", "success"]
    assert sent[:2] == sent[2:] and len(set(sent)) == 2


def test_a_task_outside_of_chords_adds_no_part() -> None:
    with eager_app.eager(), pytest.raises(ValueError, match="not a part of a chord"):
        brings.delay(1).get(timeout=0)
