"""Two FastAPI sites: one sends a task for each request and awaits that, the other only answers.

    python -m benchmarks._fastapi.site subject|bare PORT

The address of Redis, the folder of the ledger and the time-out come from the environment. `/figures` says
how long the loop was away since it was last asked.
"""

import os
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI
from fastapi.responses import JSONResponse

from benchmarks._fastapi.loop_watch import LoopWatch
from benchmarks._fastapi.tasks import app as tasks
from benchmarks._fastapi.tasks import note
from umbel.contrib.fastapi import lifespan
from umbel.errors import BrokerUnavailable


def make_site(*, sends: bool) -> FastAPI:
    watch = LoopWatch()

    @asynccontextmanager
    async def watched(_: FastAPI) -> AsyncIterator[None]:
        watch.start()
        yield

    site = FastAPI(lifespan=lifespan(tasks, watched) if sends else watched)

    @site.post("/send/{task_id}")
    async def send(task_id: str) -> Any:
        began = time.monotonic()
        try:
            if sends:
                await note.aapply_async((task_id,), task_id=task_id)
        except BrokerUnavailable as error:
            took_s = time.monotonic() - began
            return JSONResponse({"raised": type(error).__name__, "took_s": took_s}, status_code=503)
        return {"took_s": time.monotonic() - began}

    @site.get("/figures")
    async def figures() -> dict[str, float]:
        report = watch.report()
        watch.longest_s = watch.longest_own_s = 0.0
        return report

    return site


if __name__ == "__main__":
    kind, port = sys.argv[1:]
    made = make_site(sends=kind == "subject")
    options: dict[str, Any] = {"log_level": "warning", "backlog": 4096, "timeout_keep_alive": 600}
    uvicorn.run(made, host="127.0.0.1", port=int(port), **options)
    sys.exit(os.EX_OK)
