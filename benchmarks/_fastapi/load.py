"""Load: so many requests a second to each of two sites, whether or not they answer in time.

    python -m benchmarks._fastapi.load SUBJECT_PORT BARE_PORT RATE SECONDS

Each request has a connection that no other one uses meanwhile; connections are kept. Writes what became
of every request to stdout, as one JSON object.
"""

import asyncio
import json
import resource
import sys
from collections import deque
from typing import Any
from uuid import uuid4

import uvloop

ANSWER_S = 60.0
CONNECTIONS_MAX = 8000

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Client:
    """What one site answered to whom."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._idle: deque[Connection] = deque()
        self.acknowledged: list[str] = []
        self.raised: dict[str, int] = {}
        self.raised_took_s: list[float] = []
        self.took_s: list[float] = []
        self.broken = 0

    async def send(self) -> None:
        task_id = str(uuid4())
        try:
            async with asyncio.timeout(ANSWER_S):
                status, answer = await self._ask("POST", f"/send/{task_id}")
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            self.broken += 1
            return
        self.took_s.append(answer["took_s"])
        if status == 200:
            self.acknowledged.append(task_id)
        else:
            self.raised[answer["raised"]] = self.raised.get(answer["raised"], 0) + 1
            self.raised_took_s.append(answer["took_s"])

    async def figures(self) -> dict[str, float]:
        answer: dict[str, float] = (await self._ask("GET", "/figures"))[1]
        return answer

    def report(self) -> dict[str, Any]:
        took = sorted(self.took_s)
        return {
            "acknowledged": self.acknowledged,
            "raised": self.raised,
            "raised_longest_s": max(self.raised_took_s, default=0.0),
            "median_s": took[len(took) // 2] if took else 0.0,
            "broken": self.broken,
        }

    def close(self) -> None:
        for _, writer in self._idle:
            writer.close()

    async def _ask(self, method: str, path: str) -> tuple[int, Any]:
        if self._idle:
            reader, writer = self._idle.pop()
        else:
            reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        writer.write(f"{method} {path} HTTP/1.1\r\nHost: site\r\nContent-Length: 0\r\n\r\n".encode())
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(head.partition("content-length:")[2].partition("\r\n")[0])
        body = await reader.readexactly(length)
        self._idle.append((reader, writer))
        return int(head.split(" ", 2)[1]), json.loads(body)


async def load(ports: list[int], rate: float, seconds: float) -> dict[str, Any]:
    clients = [Client(port) for port in ports]
    for client in clients:
        await client.figures()  # from here on it counts
    loop, began = asyncio.get_running_loop(), asyncio.get_running_loop().time()
    async with asyncio.TaskGroup() as group:
        for number in range(round(rate * seconds)):
            await asyncio.sleep(max(0.0, began + number / rate - loop.time()))
            for client in clients:
                group.create_task(client.send())
        asked_s = loop.time() - began
    reports = [client.report() | await client.figures() for client in clients]
    for client in clients:
        client.close()
    return {"rate": rate * seconds / asked_s, "sites": reports}


if __name__ == "__main__":
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (CONNECTIONS_MAX, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    )
    subject, bare, rate, seconds = sys.argv[1:]
    asking = load([int(subject), int(bare)], float(rate), float(seconds))
    json.dump(uvloop.run(asking), sys.stdout)
