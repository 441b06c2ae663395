"""Callers that ask for ever, to be killed in mid-call: forks so many, says when all have asked.

Run with the broker's address and a count; ends with the process group that the test kills.
"""

import asyncio
import os
import sys

from umbel.brokers.interface import BrokerSettings
from umbel.brokers.registry import open_broker
from umbel.control.client import ControlClient

FOR_EVER_S = 3600.0


async def ask(url: str, told: int) -> None:
    broker = open_broker(BrokerSettings(url))
    await broker.open()
    asker = ControlClient(broker)
    await asker.ask("ping", timeout_s=60.0, limit=1)  # a worker has answered this one
    asking = asyncio.create_task(asker.ask("ping", destination=["nobody@x"], timeout_s=FOR_EVER_S))
    await asker.ask("ping", timeout_s=60.0, limit=1)
    os.write(told, b".")
    await asking


def main() -> None:
    url, count = sys.argv[1], int(sys.argv[2])
    heard, told = os.pipe()
    for _ in range(count):
        if os.fork() == 0:
            asyncio.run(ask(url, told))
            os._exit(0)
    asked = b""
    while len(asked) < count:
        asked += os.read(heard, count)
    print("asked", flush=True)
    os.wait()


if __name__ == "__main__":
    main()
