"""Staying: the demo's cluster again, with a little load and the dashboard, until it is interrupted."""

import asyncio
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from umbel.demo.load import Sent, send_batch
from umbel.demo.processes import Processes
from umbel.demo.story import WORKERS
from umbel.errors import BrokerError

BATCH_EVERY_S = 2.0
FIRST_BATCH = 100  # after those that crash a process
LOOK_EVERY_S = 0.2


async def stay(home: Path, say: Callable[[str], None], *, web: bool) -> None:
    """The dashboard shows what the demo did, too: it finds the last hour in its file."""
    itself = asyncio.current_task()
    assert itself is not None
    for signum in (signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(signum, itself.cancel)
    with Processes(home) as processes:
        for name in WORKERS:
            processes.start(name)
        if web:
            processes.show()
            while not (address := processes.address()):
                processes.check()
                await asyncio.sleep(LOOK_EVERY_S)
            say(f"dashboard: {address}")
        say(f"the cluster runs on, with logs in {home}; press Ctrl-C to stop it")
        await _send(home, processes)


async def _send(home: Path, processes: Processes) -> None:
    number = FIRST_BATCH
    while True:
        processes.check()
        with suppress(BrokerError):  # a server that is away; the next one may arrive
            await asyncio.to_thread(send_batch, Sent(), number, home)
        number += 1
        await asyncio.sleep(BATCH_EVERY_S)
