"""The shell around a machine: events in order, due deadlines first, one effect after the other."""

import asyncio
from collections.abc import AsyncIterator

from umbel.coordination.driver import TURN_S, drive, fairly, instant
from umbel.protocol.leadership.coordination import Instant
from umbel.protocol.machine import Tick


class Echo:
    """Repeats what it is told; wants a Tick at `deadline`, and says when it got one."""

    def __init__(self, deadline: float | None = None) -> None:
        self.deadline = deadline

    def step(self, event: str | Tick, now: Instant) -> list[str]:
        if isinstance(event, Tick):
            self.deadline = None
            return ["tick"]
        return [event, f"{event} again"]


async def performed_by(machine: Echo, told: list[str], count: int) -> list[str]:
    inbox: asyncio.Queue[str] = asyncio.Queue(maxsize=10)
    done: asyncio.Queue[str] = asyncio.Queue(maxsize=100)
    for event in told:
        inbox.put_nowait(event)
    async with asyncio.timeout(10.0), asyncio.TaskGroup() as group:
        driver = group.create_task(drive(machine, inbox, done.put))
        seen = [await done.get() for _ in range(count)]
        driver.cancel()
    return seen


def test_effects_are_performed_in_the_order_they_were_asked_for() -> None:
    seen = asyncio.run(performed_by(Echo(), ["a", "b"], 4))
    assert seen == ["a", "a again", "b", "b again"]


def test_a_deadline_reaches_the_machine_as_a_tick() -> None:
    seen = asyncio.run(performed_by(Echo(instant().boot_s + 0.01), [], 1))
    assert seen == ["tick"]


def test_a_due_deadline_goes_before_what_waits_in_the_inbox() -> None:
    seen = asyncio.run(performed_by(Echo(instant().boot_s - 1.0), ["a"], 3))
    assert seen == ["tick", "a", "a again"]


def test_time_that_passed_while_the_machine_slept_counts() -> None:
    """The boot clock jumps over a suspend and the loop's clock does not: the Tick comes soon."""
    moments = iter([Instant(0.0, 0.0)])

    async def scenario() -> str:
        inbox: asyncio.Queue[str] = asyncio.Queue(maxsize=1)
        done: asyncio.Queue[str] = asyncio.Queue(maxsize=1)
        async with asyncio.timeout(10.0), asyncio.TaskGroup() as group:
            woken = Instant(5000.0, 5000.0)
            driver = group.create_task(drive(Echo(3600.0), inbox, done.put, now=lambda: next(moments, woken)))
            seen = await done.get()
            driver.cancel()
        return seen

    assert asyncio.run(scenario()) == "tick"


def test_a_flood_that_is_there_already_lets_others_go_on() -> None:
    """N1: an await of what is there does not give the loop away."""

    async def flood() -> AsyncIterator[int]:
        number = 0
        while True:
            yield number
            number += 1

    async def scenario() -> None:
        async with asyncio.timeout(10.0):
            had_a_turn = asyncio.Event()
            asyncio.get_running_loop().call_later(TURN_S, had_a_turn.set)
            async for _ in fairly(flood()):
                if had_a_turn.is_set():
                    return

    asyncio.run(scenario())
