"""LoopWatch: how long an event loop was away at most, and how long without the time it waited for a CPU.

A loop that should come back every few milliseconds and does not is blocked: by code that computes, by a
call that waits, or by other processes that have the CPU. The kernel says how long a thread that could run had
to wait for a CPU (the second number of `schedstat`), so the rest is the program's own.
"""

import asyncio
from pathlib import Path

TICK_S = 0.005


class LoopWatch:
    def __init__(self) -> None:
        self.longest_s = self.longest_own_s = 0.0
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._watch())

    def report(self) -> dict[str, float]:
        return {"longest_s": self.longest_s, "longest_own_s": self.longest_own_s}

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        waits = Path("/proc/thread-self/schedstat")
        while True:
            before, waited_before = loop.time(), _waited_s(waits)
            await asyncio.sleep(TICK_S)
            away_s = max(0.0, loop.time() - before - TICK_S)
            own_s = max(0.0, away_s - (_waited_s(waits) - waited_before))
            self.longest_s = max(self.longest_s, away_s)
            self.longest_own_s = max(self.longest_own_s, own_s)


def _waited_s(schedstat: Path) -> float:
    return int(schedstat.read_text().split()[1]) / 1e9
