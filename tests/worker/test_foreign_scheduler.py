"""A scheduler in a thread of its own: started, ticked and closed once a term, whatever it raises."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from tests.waiting import DEADLINE_S, wait_until
from tests.worker.light_node import LightNode
from umbel.coordination.driver import Change, LeaseKeeper
from umbel.wire.message import Message, Outgoing
from umbel.worker import foreign_scheduler
from umbel.worker.foreign_scheduler import SchedulerTerm, SchedulerThread


class Leads:
    def still_leader(self) -> bool:
        return True

    def load_state(self) -> bytes:
        return b""

    def save_state(self, state: bytes) -> bool:
        return True

    def publish(self, messages: Sequence[Outgoing], state: bytes) -> bool:
        return True


class Told:
    """A scheduler that writes down what is asked of it; `raises` names what raises the first time."""

    def __init__(self, *raises: str, wait_s: float = 0.0, tick: Callable[[], object] = lambda: None) -> None:
        self.asked: list[str] = []
        self._raises = list(raises)
        self._wait_s = wait_s
        self._tick = tick

    def make(self, term: SchedulerTerm) -> Any:
        self._note("make")
        return self

    def start(self) -> None:
        self._note("start")

    def tick(self) -> float:
        self._note("tick")
        self._tick()
        return self._wait_s

    def close(self, lost: bool) -> None:
        self._note(f"close {lost}")

    def _note(self, what: str) -> None:
        self.asked.append(what)
        if what.partition(" ")[0] in self._raises:
            self._raises.remove(what.partition(" ")[0])
            raise KeyError(what)


def begun(told: Told, turn: "threading.Lock | None" = None) -> SchedulerThread:
    return SchedulerThread(told.make, cast("Any", Leads()), turn or threading.Lock())


def ended(thread: SchedulerThread, *, lost: bool = False) -> None:
    thread.end(lost=lost)
    assert thread.over.wait(DEADLINE_S)


@pytest.mark.parametrize("lost", [False, True])
def test_it_ticks_until_its_term_ends_and_hears_why(lost: bool) -> None:
    told = Told()
    thread = begun(told)
    wait_until(lambda: told.asked.count("tick") > 2, what="some ticks")
    ended(thread, lost=lost)
    assert told.asked[:3] == ["make", "start", "tick"] and told.asked[-1] == f"close {lost}"
    assert set(told.asked[3:-1]) <= {"tick"}


@pytest.mark.parametrize(
    ("raises", "first"),
    [
        ("make", ["make", "make", "start", "tick"]),
        ("start", ["make", "start", "make", "start", "tick"]),
        ("tick", ["make", "start", "tick", "tick"]),
    ],
)
def test_what_it_raises_is_logged_and_it_goes_on(
    raises: str, first: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    told = Told(raises, wait_s=1e9)
    thread = begun(told)
    wait_until(lambda: told.asked == first, what="it to go on")
    ended(thread)
    assert [one.message for one in caplog.records] == ["scheduler raised an exception; retrying"]
    assert told.asked == [*first, "close False"]


def test_a_close_that_raises_ends_the_term_all_the_same() -> None:
    told = Told("close", wait_s=1e9)
    thread = begun(told)
    wait_until(lambda: "tick" in told.asked, what="a tick")
    ended(thread)


@pytest.mark.parametrize("wait_s", [-1.0, float("nan"), float("inf")])
def test_how_long_it_wants_to_wait_is_bounded(wait_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreign_scheduler, "WAIT_MAX_S", 0.01)
    told = Told(wait_s=wait_s)
    thread = begun(told)
    wait_until(lambda: told.asked.count("tick") > 1, what="it to be called again")
    ended(thread)


def test_the_next_term_begins_when_the_last_tick_of_the_one_before_has_returned() -> None:
    turn, go_on = threading.Lock(), threading.Event()
    first, skipped, second = Told(tick=lambda: go_on.wait(DEADLINE_S)), Told(), Told(wait_s=1e9)
    blocked = begun(first, turn)
    wait_until(lambda: "tick" in first.asked, what="the tick that blocks")
    blocked.end(lost=True)
    ended(begun(skipped, turn), lost=True)  # a term that never got its turn
    thread = begun(second, turn)
    assert (skipped.asked, second.asked, blocked.over.is_set()) == ([], [], False)
    go_on.set()
    wait_until(lambda: "tick" in second.asked, what="the next term")
    assert first.asked == ["make", "start", "tick", "close True"]
    ended(thread)


def test_a_leader_that_was_replaced_sends_and_saves_nothing(tmp_path: Path) -> None:
    """However sure it is: the store knows better."""

    async def scenario(node: LightNode) -> None:
        store, changes = node.broker.coordination, asyncio.Queue[Change]()
        keeper = LeaseKeeper(store, "lease", "a", changed=changes.put_nowait)
        campaign = asyncio.create_task(keeper.run())
        acquired = await changes.get()
        term = SchedulerTerm(store, keeper, acquired.term, node.context.counters)
        sent = [Outgoing("q", Message(b"{}", b"[]"))]
        assert term.still_leader() and await asyncio.to_thread(term.publish, sent, b"one")
        assert await asyncio.to_thread(term.load_state) == b"one"
        assert await asyncio.to_thread(term.save_state, b"two")
        await store.release_lease("lease", "a", acquired.term)
        other = await store.acquire_lease("lease", "b", ttl_s=60.0)
        assert other.granted and other.data == b"two"
        assert not await asyncio.to_thread(term.publish, sent, b"three")
        assert not await asyncio.to_thread(term.save_state, b"three")
        assert await asyncio.to_thread(term.load_state) == b"two"
        assert (await node.broker.queues())["q"].ready == 1 and node.context.counters.periodic_sent == 1
        term.has_ended = True
        assert not term.still_leader() and not term.publish(sent, b"four")  # asks nobody
        with pytest.raises(ValueError, match="over the limit"):
            term.save_state(bytes(foreign_scheduler.STATE_MAX_BYTES + 1))
        campaign.cancel()

    async def bounded() -> None:
        node = LightNode("n", tmp_path)
        await node.broker.open()
        try:
            async with asyncio.timeout(DEADLINE_S):
                await scenario(node)
        finally:
            await node.broker.close()

    asyncio.run(bounded())
