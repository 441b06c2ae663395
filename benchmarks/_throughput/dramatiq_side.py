"""Dramatiq's side: its default middleware, persistent messages."""

import dramatiq
from dramatiq.brokers.rabbitmq import RabbitmqBroker
from dramatiq.brokers.redis import RedisBroker

from benchmarks._throughput import body
from benchmarks._throughput.places import BATCH

broker = RedisBroker(url=body.URL) if body.ON_REDIS else RabbitmqBroker(url=body.URL)
dramatiq.set_broker(broker)
noop = dramatiq.actor(body.noop)
probe = dramatiq.actor(body.probe)


def send_each(count: int) -> None:
    for number in range(count):
        noop.send(number)


def send_bulk(count: int) -> None:
    for first in range(0, count, BATCH):
        dramatiq.group(noop.message(number) for number in range(first, min(first + BATCH, count))).run()


def send(value: object) -> None:
    noop.send(value)


def send_probe() -> None:
    probe.send()


def describe() -> dict[str, str]:
    return {
        "version": dramatiq.__version__,
        "bulk": "group().run()",
        "delivery": "at least once; publishing to RabbitMQ is not confirmed",
        "crash": "loses nothing",
    }
