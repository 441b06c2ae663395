"""RQ's side: workers that do not fork for every job, no results kept, no time limits."""

import rq
from redis import Redis

from benchmarks._throughput import body
from benchmarks._throughput.places import BATCH

queue = rq.Queue(connection=Redis.from_url(body.URL), default_timeout=-1)


def send_each(count: int) -> None:
    for number in range(count):
        queue.enqueue(body.noop, number, result_ttl=0)


def send_bulk(count: int) -> None:
    for first in range(0, count, BATCH):
        queue.enqueue_many(
            [
                rq.Queue.prepare_data(body.noop, (number,), result_ttl=0, timeout=-1)
                for number in range(first, min(first + BATCH, count))
            ]
        )


def send(value: object) -> None:
    queue.enqueue(body.noop, value, result_ttl=0)


def send_probe() -> None:
    queue.enqueue(body.probe, result_ttl=0)


def describe() -> dict[str, str]:
    return {
        "version": rq.VERSION,
        "bulk": "enqueue_many()",
        "delivery": "at most once",
        "crash": "what was running is found later and called failed",
    }
