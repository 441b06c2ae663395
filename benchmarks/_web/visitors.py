"""Visitors of a monitor: so many keep its stream open, one asks for its pages, EVERY seconds, or 0: at once.

    python -m benchmarks._web.visitors URL STREAMS SECONDS EVERY STREAM_PATH PATH...

Prints the median and the longest answer of every page, and how many bytes the streams brought, as JSON.
`-` as STREAM_PATH: it has none; then so many visitors ask for the first page once a second, as Flower's
browsers do.
"""

import asyncio
import json
import sys
import time
from statistics import median
from typing import Any

import httpx

ANSWER_S = 60.0


async def main() -> None:
    url, streams, seconds, every_s = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4])
    stream_path, paths = sys.argv[5], sys.argv[6:]
    limits = httpx.Limits(max_connections=streams + 10)
    async with httpx.AsyncClient(base_url=url, timeout=ANSWER_S, limits=limits) as client:
        stopped = asyncio.Event()
        look = _reload(client, paths[0], stopped) if stream_path == "-" else _follow(client, stream_path)
        looking = [asyncio.create_task(look()) for _ in range(streams)]
        took = await _ask_in_turn(client, paths, seconds, every_s)
        stopped.set()
        for one in looking:
            one.cancel()
        ended = await asyncio.gather(*looking, return_exceptions=True)
    broken = sum(isinstance(one, Exception) for one in ended)
    print(json.dumps({"pages": {path: _shown(times) for path, times in took.items()}, "broken": broken}))


async def _ask_in_turn(
    client: httpx.AsyncClient, paths: list[str], seconds: float, every_s: float
) -> dict[str, list[float]]:
    took: dict[str, list[float]] = {path: [] for path in paths}
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        for path in paths:
            began = time.monotonic()
            answer = await client.get(path)
            took[path].append(time.monotonic() - began)
            if answer.status_code != 200:
                sys.exit(f"{path}: {answer.status_code} {answer.text[:300]}")
            await asyncio.sleep(every_s)
    return took


def _follow(client: httpx.AsyncClient, path: str) -> Any:
    async def follow() -> None:
        async with client.stream("GET", path) as answer:
            answer.raise_for_status()
            async for _ in answer.aiter_raw():
                pass
        raise ConnectionError("the stream ended")

    return follow


def _reload(client: httpx.AsyncClient, path: str, stopped: asyncio.Event) -> Any:
    async def reload() -> None:
        while not stopped.is_set():
            await client.get(path)
            await asyncio.sleep(1.0)

    return reload


def _shown(times: list[float]) -> dict[str, float]:
    return {"median_s": median(times), "longest_s": max(times), "count": len(times)}


if __name__ == "__main__":
    asyncio.run(main())
