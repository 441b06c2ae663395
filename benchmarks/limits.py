"""What does a limit for the whole cluster cost, per task?

One process, a real broker (Redis, and the embedded one): messages are claimed, permitted where they have a
limit, and settled, in batches as an idle worker has them. Five contenders, in turn, in the same rounds:
without a limit; with a limit of tasks at a time that is never reached, over as many keys as a batch has
messages; with a rate that is never reached; without a limit, but each message singly; and with one task at a
time for one key, so that every message but the first waits, is called and comes singly. Wall time; the least
of the rounds counts. Sending is measured apart: from the call to its message, in processor time.

    .venv/bin/python benchmarks/limits.py [--json] [--messages N] [--batch N] [--rounds N]
"""

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter, process_time

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.servers.redis import RedisServer
from umbel import App, Concurrency, Rate
from umbel.brokers.interface import Ack, Broker, BrokerSettings, Delivery, Permit
from umbel.brokers.registry import open_broker
from umbel.protocol.delivery.limits import Terms
from umbel.wire.message import Message, Outgoing

OWNER, QUEUE = "bench@here.1", "celery"
MANY, QUICK, ONE = Concurrency(1000).terms, Rate("1000000/s").terms, Concurrency(1).terms

Bucket = Callable[[int], str]
CONTENDERS: dict[str, tuple[Terms | None, Bucket, bool]] = {
    "no limit": (None, lambda _: "", False),
    "at a time, not reached": (MANY, lambda place: f"t:{place}", False),
    "rate, not reached": (QUICK, lambda place: f"t:{place}", False),
    "no limit, one by one": (None, lambda _: "", True),
    "one at a time, all wait": (ONE, lambda _: "t:one", False),
}


def message(number: int) -> Outgoing:
    headers = f'{{"task": "t", "id": "{number:032}", "umbel_limit": "k"}}'.encode()
    return Outgoing(QUEUE, Message(headers, b"[[1], {}, {}]", correlation_id=f"{number:032}"))


async def permitted(
    broker: Broker, deliveries: Sequence[Delivery], terms: Terms | None, bucket: Bucket
) -> Sequence[Delivery]:
    if terms is None:
        return deliveries
    asked = [
        Permit(one.tag, one.message.correlation_id, bucket(place), terms)
        for place, one in enumerate(deliveries)
    ]
    refused = await broker.permit(asked)
    return [one for one in deliveries if one.tag not in refused]


async def seconds(broker: Broker, name: str, count: int, batch: int) -> float:
    terms, bucket, is_singly = CONTENDERS[name]
    await broker.publish([message(number) for number in range(count)])
    began, done = perf_counter(), 0
    while done < count:
        claim = await broker.claim(OWNER, [QUEUE], 1 if is_singly else batch)
        started = await permitted(broker, claim.deliveries, terms, bucket)
        if started:
            await broker.settle([Ack(one.tag) for one in started])
        done += len(started)
    return perf_counter() - began


async def measure(url: str, count: int, batch: int, rounds: int) -> dict[str, float]:
    broker = open_broker(BrokerSettings(url))
    await broker.open()
    best = dict.fromkeys(CONTENDERS, float("inf"))
    try:
        for turn in range(rounds):
            for name in list(CONTENDERS)[:: -1 if turn % 2 else 1]:
                best[name] = min(best[name], await seconds(broker, name, count, batch))
    finally:
        await broker.close()
    return {name: round(best_s / count * 1e6, 1) for name, best_s in best.items()}


def sending(calls: int, rounds: int) -> dict[str, float]:
    app = App("bench", broker="sqlite:///nowhere.db")

    @app.task(name="plain")
    def plain(customer: str) -> None: ...

    @app.task(name="limited", limit=Rate("100/m", key="{customer}"))
    def limited(customer: str) -> None: ...

    best = {"no limit": float("inf"), "limit": float("inf")}
    for _ in range(rounds):
        for name, task in (("no limit", "plain"), ("limit", "limited")):
            began = process_time()
            for _ in range(calls):
                app.prepare(task, ("ada",), {}, {})
            best[name] = min(best[name], process_time() - began)
    return {name: round(best_s / calls * 1e6, 1) for name, best_s in best.items()}


@contextmanager
def places() -> Iterator[dict[str, str]]:
    with tempfile.TemporaryDirectory() as directory:
        server = RedisServer(Path(directory))
        server.start()
        try:
            yield {"Redis": server.url, "SQLite": f"sqlite:///{directory}/queue.db"}
        finally:
            server.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description="What a limit for the cluster costs, per task.")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--messages", type=int, default=4000)
    parser.add_argument("--batch", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=5)
    chosen = parser.parse_args()
    with places() as urls:
        found = {
            name: asyncio.run(measure(url, chosen.messages, chosen.batch, chosen.rounds))
            for name, url in urls.items()
        }
    found["sending"] = sending(chosen.messages, chosen.rounds)
    if chosen.json:
        print(json.dumps({"unit": "microseconds per task", **found}))
        return
    for where, costs in found.items():
        print(f"{where}, microseconds per task")
        for name, cost in costs.items():
            print(f"  {name:26} {cost:8.1f}")


if __name__ == "__main__":
    main()
