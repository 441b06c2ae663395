"""A large cluster that is not there: the events of many nodes, told over Redis as Celery's workers tell them.

    python -m benchmarks._web.stream URL NODES TASKS RATE

Events of so many tasks, so many a second, and every node's heartbeat every two seconds among them. Prints
how many events there were and how long it took, as JSON.
"""

import json
import sys
import time
from collections.abc import Iterator
from typing import Any

from benchmarks._events.history import History
from umbel.brokers.interface import Broadcast, BrokerSettings
from umbel.brokers.registry import open_producer
from umbel.events.stamp import EVENT_EXCHANGE, EVENT_TTL_S

HEARTBEAT_S = 2.0
STEP_S = 0.02


def main() -> None:
    url, nodes, tasks, rate = sys.argv[1], *map(int, sys.argv[2:])
    producer = open_producer(BrokerSettings(url))
    began, told = time.monotonic(), 0
    stream = events(nodes, tasks, rate)
    step = max(1, round(rate * STEP_S))
    while batch := [one for one, _ in zip(stream, range(step), strict=False)]:
        producer.broadcast([_message(one) for one in batch], ttl_s=EVENT_TTL_S)
        told += len(batch)
        time.sleep(max(0.0, began + told / rate - time.monotonic()))
    producer.close()
    print(json.dumps({"events": told, "seconds": time.monotonic() - began}))


def events(nodes: int, tasks: int, rate: int) -> Iterator[dict[str, Any]]:
    """Those of tasks, and as many heartbeats between them as the nodes send at that rate."""
    told_by = [(f"worker{number}@host{number}", 1000 + number, True) for number in range(nodes)]
    every = max(2, round(rate * HEARTBEAT_S / nodes))
    beats, clock = 0, 0
    for number, event in enumerate(History(seed=time.time_ns(), nodes=told_by, began=None).events(tasks)):
        clock = max(clock, event["clock"])
        yield event
        if number % (every - 1) == 0:
            yield _heartbeat(*told_by[beats % nodes][:2], clock)
            beats += 1


def _heartbeat(hostname: str, pid: int, clock: int) -> dict[str, Any]:
    system = {"sw_ident": "py-celery", "sw_ver": "5.7.0", "sw_sys": "Linux"}
    figures = {"freq": HEARTBEAT_S, "active": 2, "processed": clock, "loadavg": [0.5, 0.5, 0.5]}
    return {
        "type": "worker-heartbeat",
        "hostname": hostname,
        "pid": pid,
        "clock": clock,
        "timestamp": time.time(),
        "utcoffset": 0,
        **system,
        **figures,
    }


def _message(event: dict[str, Any]) -> Broadcast:
    headers = json.dumps({"hostname": event["hostname"]}).encode()
    return Broadcast(EVENT_EXCHANGE, event["type"].replace("-", "."), json.dumps(event).encode(), headers)


if __name__ == "__main__":
    main()
