"""drive(): the asyncio shell around any machine of the cluster; fairly(): that around what it hears.

Neither keeps the loop for longer than TURN_S while what others send comes faster than it is worked off:
an await of what is there already does not let others go on.

Deadlines are on the boot clock, which counts the time a machine was suspended; the loop's clock
does not. So a wait for a deadline is never longer than RECHECK_S without a look at the boot clock.
"""

import asyncio
import time
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable
from typing import NoReturn, TypeVar

from umbel.clock import boot_time_s
from umbel.protocol.leadership.coordination import Instant
from umbel.protocol.machine import ClusterMachine, Tick

RECHECK_S = 1.0
TURN_S = 0.005
EventT = TypeVar("EventT")
EffectT = TypeVar("EffectT")


def instant() -> Instant:
    return Instant(boot_time_s(), time.time())


async def drive(
    machine: ClusterMachine[EventT, EffectT],
    inbox: asyncio.Queue[EventT],
    perform: Callable[[EffectT], Awaitable[None]],
    *,
    now: Callable[[], Instant] = instant,
) -> NoReturn:
    """Feed one machine from one inbox until cancelled.

    Exactly one task drives a machine: step() never awaits, so the machine needs no lock, and its
    effects are performed in the order it asked for them.
    """
    turn_ends = time.monotonic() + TURN_S
    while True:
        event = await _next_event(machine, inbox, now)
        for effect in machine.step(event, now()):
            await perform(effect)
        if time.monotonic() >= turn_ends:
            await asyncio.sleep(0)
            turn_ends = time.monotonic() + TURN_S


async def fairly(
    heard: AsyncIterable[EventT], *, rest_s: Callable[[float], float] = lambda _used_s: 0.0
) -> AsyncIterator[EventT]:
    """The same, with a pause for others after each turn; `rest_s` says how long, for the CPU time it took."""
    turn_ends, used_s = time.monotonic() + TURN_S, time.thread_time()
    async for one in heard:
        yield one
        if time.monotonic() >= turn_ends:
            await asyncio.sleep(rest_s(time.thread_time() - used_s))
            turn_ends, used_s = time.monotonic() + TURN_S, time.thread_time()


async def _next_event(
    machine: ClusterMachine[EventT, EffectT], inbox: asyncio.Queue[EventT], now: Callable[[], Instant]
) -> EventT | Tick:
    while True:
        deadline = machine.deadline
        if deadline is None:
            return await inbox.get()
        # A due deadline goes first, or an inbox that never empties would starve it.
        left_s = deadline - now().boot_s
        if left_s <= 0:
            return Tick()
        try:
            async with asyncio.timeout(min(left_s, RECHECK_S)):
                return await inbox.get()
        except TimeoutError:
            continue
