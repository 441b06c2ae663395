"""Umbel's side: an app with its default settings, apart from the address and the results.

Where its messages are signed, it names its cluster; commits that are compared may know no such setting.
"""

import asyncio

import umbel
from benchmarks._throughput import body
from benchmarks._throughput.places import BATCH
from umbel import App
from umbel.app.settings import Settings

_CLUSTER = {"signing_cluster": "bench"} if "signing_cluster" in Settings.__struct_fields__ else {}
app = App("bench", broker=body.URL, task_ignore_result=True, **_CLUSTER)
noop = app.task(body.noop)
probe = app.task(body.probe)


def send_each(count: int) -> None:
    for number in range(count):
        noop.delay(number)


def send_bulk(count: int) -> None:
    for first in range(0, count, BATCH):
        app.send_many(noop.s(number) for number in range(first, min(first + BATCH, count)))


def send(value: object) -> None:
    noop.delay(value)


if hasattr(App, "__aenter__"):  # which commits that are compared may lack

    def send_awaited(count: int, senders: int) -> None:
        async def sender(first: int) -> None:
            for number in range(first, count, senders):
                await noop.adelay(number)

        async def send() -> None:
            async with app:
                await asyncio.gather(*map(sender, range(senders)))

        asyncio.run(send())


def send_probe() -> None:
    probe.delay()


def describe() -> dict[str, str]:
    return {
        "version": umbel.__version__,
        "bulk": "app.send_many()",
        "delivery": "at least once; publishing to RabbitMQ is confirmed",
        "crash": "loses nothing",
    }
