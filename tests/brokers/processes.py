"""Programs for the contract suite to run in processes of their own, and to kill.

Usage: python -m tests.brokers.processes PROGRAM URL ARGUMENT...
"""

import asyncio
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine

from tests.brokers.under_test import QUEUE, outgoing, texts
from umbel.brokers.interface import Ack, BrokerSettings, Return
from umbel.brokers.registry import open_broker, open_producer


async def claim(url: str, owner: str, lease_s: str) -> None:
    """Claim and acknowledge until a message says "end"; print what was taken."""
    broker = open_broker(BrokerSettings(url, lease_s=float(lease_s)))
    await broker.open()
    taken: list[str] = []
    while True:
        deliveries = (await broker.claim(owner, [QUEUE], 7)).deliveries
        ends = [delivery for delivery in deliveries if delivery.message.body == b"end"]
        await broker.settle([Return(delivery.tag) for delivery in ends[1:]])
        await broker.settle([Ack(delivery.tag) for delivery in deliveries if delivery not in ends[1:]])
        taken += [text for text in texts(deliveries) if text != "end"]
        if ends:
            break
        if not deliveries:
            await broker.wait_ready([QUEUE], 30.0)
    await broker.close()
    print(json.dumps(taken))


async def hold(url: str, owner: str, lease_s: str) -> None:
    """Claim everything, print it, and wait to be killed."""
    broker = open_broker(BrokerSettings(url, lease_s=float(lease_s)))
    await broker.open()
    claimed = await broker.claim(owner, [QUEUE], 100)
    print(json.dumps(texts(claimed.deliveries)), flush=True)
    threading.Event().wait()


def publish(url: str, size: str) -> None:
    """Publish batches until killed; print a line for each that was confirmed."""
    producer = open_producer(BrokerSettings(url))
    batch = 0
    while True:
        producer.publish(outgoing(*(f"{batch}.{number}" for number in range(int(size)))))
        print(batch, flush=True)
        batch += 1


def send(url: str, text: str) -> None:
    open_producer(BrokerSettings(url)).publish(outgoing(text))


def die_writing(url: str) -> None:
    """Write half a batch of the embedded broker, and die before the commit."""
    from umbel.brokers.sqlite import publishing
    from umbel.brokers.sqlite.store import Store

    with Store(BrokerSettings(url)).database.write() as db:
        publishing.insert(db, outgoing("half", *(str(number) * 10_000 for number in range(2000))), 0.0)
        os.kill(os.getpid(), signal.SIGKILL)


SYNCHRONOUS: dict[str, Callable[..., None]] = {"publish": publish, "send": send, "die_writing": die_writing}
ASYNCHRONOUS: dict[str, Callable[..., Coroutine[None, None, None]]] = {"claim": claim, "hold": hold}


def main(program: str, *args: str) -> None:
    if program in SYNCHRONOUS:
        SYNCHRONOUS[program](*args)
    else:
        asyncio.run(ASYNCHRONOUS[program](*args))


if __name__ == "__main__":
    main(*sys.argv[1:])
