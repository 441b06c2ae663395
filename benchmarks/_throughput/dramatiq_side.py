"""Dramatiq's side: its default middleware, persistent messages; confirmed if CONFIRM_VARIABLE is set."""

import os

import dramatiq
from dramatiq.brokers.rabbitmq import RabbitmqBroker
from dramatiq.brokers.redis import RedisBroker

from benchmarks._throughput import body
from benchmarks._throughput.places import BATCH, CONFIRM_VARIABLE

CONFIRMS = CONFIRM_VARIABLE in os.environ

broker = (
    RedisBroker(url=body.URL) if body.ON_REDIS else RabbitmqBroker(url=body.URL, confirm_delivery=CONFIRMS)
)
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
        "delivery": f"at least once; publishing to RabbitMQ is {'' if CONFIRMS else 'not '}confirmed",
        "crash": "loses nothing",
    }
