"""A worker's main process for tests that kill it: starts a pool, tells its pids, waits."""

import asyncio
import json
import sys
from typing import Any

from tests.pools.host import make_job
from tests.pools.recorder import Recorder, running, settings
from umbel.pools import make_pool
from umbel.pools.prefork.messages import setup_of
from umbel.pools.prefork.server_process import ForkPoint, StartedServer


async def main(first_server: StartedServer | None) -> None:
    async with running("prefork", first_server=first_server) as (pool, recorder):
        pool.submit([make_job(1, "subprocess"), make_job(2, "multiprocess"), make_job(4, "daemon")])
        await recorder.until_back(1, 2, 4)
        pool.submit([make_job(3, "sleep", 1000, alone=True)])
        await recorder.until(lambda: 3 in recorder.begun, what="the long job to begin")
        about: dict[str, Any] = pool.describe()
        grandchildren = [recorder.value(number) for number in (1, 2, 4)]
        print(json.dumps({**about, "grandchildren": grandchildren}), flush=True)
        await asyncio.Event().wait()


async def load_forever() -> None:
    """Tell the pid of the guard, and never come further."""
    pool = make_pool("prefork", settings("load-forever"))
    async with asyncio.TaskGroup() as group:
        group.create_task(pool.start(Recorder()))
        while (guard := pool.describe()["fork-server"]) is None:
            await asyncio.wait([asyncio.ensure_future(asyncio.Event().wait())], timeout=0.01)
        print(guard, flush=True)


if __name__ == "__main__":
    sys.path.insert(0, "")
    first = None
    if "forked" in sys.argv:
        first = ForkPoint().fork(setup_of(settings()), lambda: None)
    asyncio.run(load_forever() if "load-forever" in sys.argv else main(first))
