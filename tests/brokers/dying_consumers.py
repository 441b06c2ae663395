"""Consumers that die, one after another, at whatever moment chance has for them.

Usage: python -m tests.brokers.dying_consumers URL LOG NAME LEASE_S

Each is a process of its own, forked when the one before it has died, and an owner of its own. It
writes a line to LOG for each message that it runs: the text, and whether it may have run before.
"""

import asyncio
import os
import random
import signal
import sys
from contextlib import suppress
from itertools import count

from tests.brokers.under_test import QUEUE
from umbel.brokers.interface import Ack, BrokerSettings
from umbel.brokers.registry import open_broker

DEATH = 0.06  # the chance of it at each of the moments of a message


async def live(url: str, log: int, owner: str, lease_s: float) -> None:
    chance = random.Random(owner)

    def survive() -> None:
        if chance.random() < DEATH:
            os.kill(os.getpid(), signal.SIGKILL)

    broker = open_broker(BrokerSettings(url, lease_s=lease_s))
    await broker.open()
    while True:
        deliveries = (await broker.claim(owner, [QUEUE], 2)).deliveries
        if not deliveries:
            await broker.wait_ready([QUEUE], lease_s / 4, owner=owner)
            continue
        survive()  # what was handed over is not adopted yet
        for one in deliveries:
            os.write(log, f"{one.message.body.decode()} {int(one.redelivered)}\n".encode())
            survive()
            await broker.renew(owner)
            survive()
            await broker.settle([Ack(one.tag)])
        survive()


def main(url: str, log: str, name: str, lease_s: str) -> None:
    file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for number in count():
        # Told to end between two lives, we would not know whom to end with us.
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        child = os.fork()
        signal.signal(signal.SIGTERM, (lambda *_, child=child: end(child)) if child else signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
        if not child:
            asyncio.run(live(url, file, f"{name}@here.{number}", float(lease_s)))
        os.waitpid(child, 0)


def end(child: int) -> None:
    with suppress(ProcessLookupError):  # it has just died by itself
        os.kill(child, signal.SIGKILL)
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
