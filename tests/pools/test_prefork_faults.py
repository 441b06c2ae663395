"""N1: whatever a job, a child or a listener does, the pool's step goes on to its end."""

import asyncio
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.pools.host import make_job
from tests.pools.recorder import Recorder, running, settings, until_waiting
from umbel.errors import BadFrame
from umbel.pools.interface import Job, Outcome, UserEvent
from umbel.pools.prefork import children, links
from umbel.pools.prefork.links import ChildLink
from umbel.pools.prefork.messages import (
    Exited,
    Forked,
    FromChild,
    FromServer,
    Loaded,
    NoOutcome,
    NotForked,
    Signal,
    Spoiled,
    ToChild,
    ToServer,
)
from umbel.pools.prefork.parent import PreforkPool
from umbel.pools.prefork.server_process import StartedServer
from umbel.wire.frames import Armed, Cancel, FrameReader, Outcomes, Problem, Ready, SoftLimit, encode_frame

SLOTS = 1000
SOAK = bool(os.environ.get("UMBEL_SOAK"))
CHILDREN = 500 if SOAK else 80


# ---- as many children as there may be ----------------------------------------------------------------


class FakeLink:
    """A child that takes nothing: what is sent stays where it is."""

    def __init__(self, key: int, child: int, **calls: Callable[..., None]) -> None:
        self.key, self.child, self.pid = key, child, 100_000 + child
        self.doom = self.dismissed = self.problem = ""
        self.unsaid: dict[int, Any] = {}
        self.armed = self.orphan = False
        self.tokens = b""
        self.on_messages = calls["on_messages"]

    def put_tokens(self, batch: int, count: int) -> None:
        self.tokens += bytes((batch,)) * count

    def take_tokens(self) -> bytes:
        tokens, self.tokens = self.tokens, b""
        return tokens

    def send(self, frame: bytearray) -> None:
        pass

    def pause_reading(self, pause_s: float) -> None:
        pass

    def drain(self) -> None:
        pass

    def close(self) -> None:
        pass


class FakeServers:
    pid = 4711

    def __init__(self, _: object, listener: Any, first: StartedServer | None) -> None:
        self._listener = listener
        self._links: dict[int, FakeLink] = {}

    def is_loaded(self) -> bool:
        return True

    def make_child(self, link: FakeLink) -> None:
        self._links[link.key] = link
        asyncio.get_running_loop().call_soon(link.on_messages, link, [Ready(link.pid)])

    def is_known(self, link: FakeLink) -> bool:
        return link.key in self._links

    def forget(self, link: FakeLink) -> None:
        del self._links[link.key]

    def signal(self, link: FakeLink, signum: int) -> None:
        asyncio.get_running_loop().call_soon(self._listener.on_exited, link, signum)

    async def close(self) -> None:
        pass


def fake_pool(concurrency: int) -> PreforkPool:
    return PreforkPool(settings(concurrency=concurrency, batch_patience_s=1000.0, stop_grace_s=0.0))


@contextmanager
def little_stack(frames: int) -> Iterator[None]:
    """So few frames more than there are now; a pool that recursed would need some for each child."""
    depth, frame, before = 0, sys._getframe(), sys.getrecursionlimit()
    while frame.f_back is not None:
        depth, frame = depth + 1, frame.f_back
    sys.setrecursionlimit(depth + frames)
    try:
        yield
    finally:
        sys.setrecursionlimit(before)


async def teach(pool: PreforkPool, recorder: Recorder) -> None:
    """Let it know the task as a quick one, so that each child gets a batch."""
    pool.submit([make_job(-1)])
    link: Any = pool._children.links[0]
    link.take_tokens()
    link.on_messages(link, [Outcomes((Outcome(-1, "success", 0.0, 0.0001),))])
    await recorder.until_back(-1)


def test_a_thousand_busy_children_are_recalled_resized_and_stopped_in_a_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(children, "ChildLink", FakeLink)
    monkeypatch.setattr(children, "ForkServers", FakeServers)

    async def scenario() -> None:
        pool, recorder = fake_pool(SLOTS), Recorder()
        await pool.start(recorder)
        await teach(pool, recorder)
        numbers = range(SLOTS * 3)
        jobs = [make_job(number) for number in numbers]
        with little_stack(150):
            pool.submit(jobs)
            assert pool.describe()["waiting"] == 0
            assert sorted(job.number for job in pool.withdraw()) == list(numbers)
            pool.submit(jobs)  # as for a revoke: what is not concerned is given out again
            assert pool.resize(-SLOTS // 2) == SLOTS // 2
            await pool.stop(grace_s=0.0)
        assert Counter(recorder.came_back) == Counter([-1, *numbers])
        assert not any(lost.started or lost.ran for lost in recorder.lost.values())

    asyncio.run(scenario())


def test_a_listener_withdraws_and_submits_in_the_middle_of_a_thousand_children(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What it asks for is done when it gets its answer, not later."""
    monkeypatch.setattr(children, "ChildLink", FakeLink)
    monkeypatch.setattr(children, "ForkServers", FakeServers)

    async def scenario() -> None:
        pool, recorder = fake_pool(SLOTS), Recorder()
        await pool.start(recorder)
        await teach(pool, recorder)
        withdrawn: list[int] = []

        def withdraw_and_submit() -> None:
            jobs = pool.withdraw()
            withdrawn.append(len(jobs))
            pool.submit(jobs)

        recorder.then = withdraw_and_submit
        with little_stack(150):
            pool.submit([make_job(number) for number in range(SLOTS)])
            link: Any = pool._children.links[7]
            batch = link.take_tokens()[:1]
            number = pool._slots._children[7].batches[0].jobs[0].number
            link.on_messages(link, [Outcomes((Outcome(number, "success", 0.0, 0.0001),))])
            recorder.then = None
            assert batch
            assert max(withdrawn) == SLOTS - 1
            await pool.stop(grace_s=0.0)
        assert Counter(recorder.came_back) == Counter(range(-1, SLOTS))

    asyncio.run(scenario())


@pytest.mark.scenario
def test_as_many_busy_processes_as_there_are_stop_and_give_back_what_has_not_started(tmp_path: Path) -> None:
    async def scenario() -> None:
        quick: dict[str, Any] = {
            "batch_patience_s": 1000.0,
            "batch_target_s": 1000.0,
            "start_timeout_s": 300.0,
        }
        async with running("prefork", concurrency=CHILDREN, **quick) as (pool, recorder):
            pool.submit([make_job(-1)])
            await recorder.until_back(-1)
            gate = tmp_path / "gate"
            gates = [make_job(n, "wait-for", str(gate), task="return") for n in range(CHILDREN)]
            behind = [make_job(n) for n in range(CHILDREN, CHILDREN * 2)]
            # A child gets every so manieth in a row: the gate first, then what waits behind it.
            pool.submit([job for pair in zip(gates, behind, strict=True) for job in pair])
            await until_waiting(gate)
            await recorder.until(lambda: len(pool.describe()["running"]) == CHILDREN, what="all to be busy")
            with little_stack(900 if SOAK else 100):
                withdrawn = [job.number for job in pool.withdraw()]
                pool.submit([make_job(number) for number in withdrawn])
                gate.touch()
                await pool.stop(grace_s=60.0)
            assert withdrawn
            assert Counter(recorder.came_back) == Counter(range(-1, CHILDREN * 2))
            assert not any(lost.started for lost in recorder.lost.values())

    asyncio.run(scenario())


# ---- one effect, one child, one job ------------------------------------------------------------------


def test_an_effect_that_raises_costs_its_child_and_no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens_of = ChildLink.put_tokens
    faults = [OSError("the pipe is gone"), AssertionError("it is full")]

    def put_tokens(link: ChildLink, batch: int, count: int) -> None:
        if faults:
            raise faults.pop()
        tokens_of(link, batch, count)

    async def scenario() -> None:
        async with running("prefork") as (pool, recorder):
            monkeypatch.setattr(ChildLink, "put_tokens", put_tokens)
            pool.submit([make_job(number) for number in range(50)])
            await recorder.until_back(*range(50))
            assert not recorder.lost
            assert Counter(recorder.came_back) == Counter(range(50))
            assert pool.describe()["faults"] == 2
            await recorder.until(lambda: len(recorder.deaths()) == 2, what="both children to be replaced")
            assert "internal error in the pool: " in recorder.deaths()[0]["reason"]

    asyncio.run(scenario())


def test_a_recall_that_raises_is_answered_all_the_same(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A withdrawal that waited for an answer would never end, and nothing would be given out again."""
    take = ChildLink.take_tokens
    faults = [OSError("no such pipe")]

    def take_tokens(link: ChildLink) -> bytes:
        if faults:
            raise faults.pop()
        return take(link)

    async def scenario() -> None:
        async with running("prefork", concurrency=1, batch_patience_s=1000.0) as (pool, recorder):
            pool.submit([make_job(0)])
            await recorder.until_back(0)
            gate = tmp_path / "gate"
            pool.submit([make_job(1, "wait-for", str(gate), task="return"), make_job(2)])
            await until_waiting(gate)
            monkeypatch.setattr(ChildLink, "take_tokens", take_tokens)
            assert pool.withdraw() == ()
            await recorder.until_back(1)
            pool.submit([make_job(3)])
            await recorder.until_back(2, 3)
            assert Counter(recorder.came_back) == Counter(range(4))

    asyncio.run(scenario())


def test_a_fault_of_the_machine_itself_fails_the_pool_which_can_still_be_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario() -> None:
        async with running("prefork") as (pool, recorder):
            assert isinstance(pool, PreforkPool)
            monkeypatch.setattr(pool._slots, "step", lambda *_: 1 / 0)
            assert pool.withdraw() == ()
            failed = [fields["reason"] for what, fields in recorder.children if what == "failed"]
            assert failed[0].startswith("internal error in the pool: ")

    asyncio.run(scenario())


def test_a_job_without_a_name_that_can_be_written_is_refused_and_its_neighbours_run() -> None:
    async def scenario() -> None:
        async with running("prefork") as (pool, recorder):
            odd = [make_job(number, task="\udcff") for number in (1, 4)]
            pool.submit([make_job(0), odd[0], make_job(2), make_job(3), odd[1]])
            await recorder.until_back(*range(5))
            assert sorted(recorder.lost) == [1, 4]
            assert "UnicodeEncodeError" in recorder.lost[1].fault
            assert set(recorder.begun).isdisjoint(recorder.lost)
            assert not recorder.deaths()

    asyncio.run(scenario())


@pytest.mark.parametrize("name", ["prefork", "gevent"])
def test_an_outcome_that_cannot_be_sent_is_a_fault_of_its_job_alone(name: str) -> None:
    async def scenario() -> None:
        async with running(name) as (pool, recorder):
            pool.submit([make_job(0), make_job(1, "odd-error"), make_job(2)])
            await recorder.until_back(0, 1, 2)
            lost = recorder.lost[1]
            assert (lost.started, lost.ran) == (False, True)
            assert (
                "the task ran, but its outcome could not be sent to the worker: UnicodeEncodeError"
                in lost.fault
            )
            assert sorted(recorder.outcomes) == [0, 2]
            assert not recorder.deaths()

    asyncio.run(scenario())


# ---- what a child may write --------------------------------------------------------------------------


def hexed(*messages: msgspec.Struct) -> str:
    return b"".join(encode_frame(message) for message in messages).hex()


def outcome(number: int, runtime_s: float = 0.0) -> Outcomes[Outcome]:
    return Outcomes((Outcome(number, "success", 0.0, runtime_s),))


GARBAGE = {
    "text": b"a line for the wrong descriptor\n".hex(),
    "a length": (100_000_000).to_bytes(4, "big").hex(),
    "half a header": "f5",
    "a frame without an end": (bytes(encode_frame(Ready(1)))[:4] + (2**28).to_bytes(4, "big")).hex(),
    "a frame over the limit": (bytes(encode_frame(Ready(1)))[:4] + b"\xff\xff\xff\xff").hex(),
    "text that is not UTF-8": encode_frame(Problem("ABCD")).hex().replace(b"ABCD".hex(), "ffffffff"),
    "an outcome of nobody": hexed(outcome(77)),
    "an outcome of another child's job": hexed(outcome(2)),
    "no outcome for nobody": hexed(NoOutcome(77, "x"), NoOutcome(2, "x")),
    "a huge number": hexed(outcome(2**64 - 1)),
}
HARMLESS = {
    "it is ready once more, under another number": hexed(Ready(1), Ready(0), Ready(2**63)),
    "news of nobody": hexed(UserEvent(77, "x", 0.0, b"{"), Armed(), Problem("x" * 100_000)),
    "a runtime that is none": hexed(outcome(1, float("nan")), outcome(1, float("inf"))),
    "the smallest runtime there is": hexed(outcome(1, 5e-324)),
    "it is spoiled": hexed(Spoiled("by a task"), Spoiled("twice")),
}


@pytest.mark.parametrize("kind", [*GARBAGE, *HARMLESS])
def test_a_child_that_writes_what_it_should_not_harms_no_other(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "STALL_S", 0.3)

    async def scenario() -> None:
        async with running("prefork") as (pool, recorder):
            gate = tmp_path / "gate"
            pool.submit([make_job(2, "wait-for", str(gate))])
            await until_waiting(gate)
            pool.submit([make_job(1, "write", (GARBAGE | HARMLESS)[kind])])
            await recorder.until_back(1)
            if kind in GARBAGE:
                (death,) = await recorder.until(recorder.deaths, what="the child to be killed")
                assert death["how"] == "killed"
            assert pool.room() >= 0
            pool.submit([make_job(number) for number in range(3, 30)])
            await recorder.until_back(*range(3, 30))
            gate.touch()
            await recorder.until_back(2)
            assert recorder.value(2) == "released"
            assert Counter(recorder.came_back) == Counter(range(1, 30))

    asyncio.run(scenario())


from_child = st.one_of(
    st.builds(outcome, st.integers(0, 9), st.floats()),
    st.builds(NoOutcome, st.integers(0, 9), st.text(max_size=9)),
    st.builds(UserEvent, st.integers(0, 9), st.text(max_size=9), st.floats(), st.binary(max_size=9)),
    st.builds(Ready, st.integers(-(2**63), 2**64 - 1)),
    st.builds(Spoiled, st.text(max_size=9)),
)
frames = from_child | st.one_of(
    st.builds(SoftLimit, st.integers(0, 9), st.booleans()),
    st.builds(Cancel, st.integers(0, 9)),
    st.builds(Signal, st.integers(0, 9), st.integers(0, 99)),
    st.builds(Loaded, st.text(max_size=9), st.integers(0, 99)),
    st.builds(Forked, st.integers(0, 9), st.integers(0, 99)),
    st.builds(NotForked, st.integers(0, 9), st.text(max_size=9)),
    st.builds(Exited, st.integers(0, 9), st.integers(0, 99)),
)


@st.composite
def streams(draw: st.DrawFn) -> bytes:
    stream = bytearray().join(encode_frame(frame) for frame in draw(st.lists(frames, max_size=4)))
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(stream)))
        stream[at : at + draw(st.integers(0, 6))] = draw(st.binary(max_size=6))
    return bytes(stream)


@pytest.mark.parametrize("kind", [FromChild, ToChild, FromServer, ToServer])
@given(stream=streams())
def test_any_bytes_between_the_processes_are_messages_or_a_bad_frame(kind: Any, stream: bytes) -> None:
    reader: FrameReader[object] = FrameReader(kind)
    try:
        reader.feed(stream)
    except BadFrame:
        assert reader.problem is not None


@given(sent=st.lists(from_child, max_size=6))
def test_whatever_children_say_each_job_comes_back_once(sent: list[Any]) -> None:
    """In any order, about any job, and the pool works on afterwards."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(children, "ChildLink", FakeLink)
        monkeypatch.setattr(children, "ForkServers", FakeServers)
        asyncio.run(_heard(sent))


async def _heard(sent: list[Any]) -> None:
    pool, recorder = fake_pool(2), Recorder()
    await pool.start(recorder)
    jobs: list[Job] = [make_job(number) for number in range(10)]
    pool.submit(jobs)
    for message in sent:
        for link in list(pool._children.links.values()):
            link.on_messages(link, [message])  # type: ignore[attr-defined]
            assert pool.room() >= 0
    back = [*recorder.came_back, *(job.number for job in pool.withdraw())]
    await pool.stop(grace_s=0.0)
    back += [number for number in recorder.came_back if number not in back]
    assert Counter(back) == Counter(range(10))
    assert not [what for what, _ in recorder.children if what == "failed"]
