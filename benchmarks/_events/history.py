"""A cluster's history as events of the wire: the same for every contender, from one seed.

Eight nodes, half of them Celery's and half Umbel's, each telling its own kind of events; some sixty
tasks under way at any time. One task in twenty is tried twice, one in twenty-five fails. Clocks
only grow, so that whoever sorts events by them finds it easy. Only the standard library: this file
is imported in the peers' environment, too.
"""

import random
import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

Wire = dict[str, Any]

NODES = [(f"worker{number}@host{number}", 1000 + number, number % 2 == 0) for number in range(8)]
NAMES = [f"shop.tasks.step_{number}" for number in range(20)]
UNDER_WAY = 64
INCARNATION = 1_794_703_000_000_000
BEGAN = 1_794_703_129.0


class History:
    """`began`: the time of the first event; None: each is told when it is made."""

    def __init__(
        self,
        seed: int = 7,
        *,
        nodes: Sequence[tuple[str, int, bool]] = NODES,
        began: float | None = BEGAN,
    ) -> None:
        self._chance = random.Random(seed)
        self._nodes, self._began = nodes, began
        self._clock = 0
        self._sequence = 0
        self._number = 0
        self._stories: list[Iterator[Wire]] = []

    def events(self, tasks: int) -> Iterator[Wire]:
        """All that is told of so many more tasks, mixed as they run."""
        to_come = tasks
        while to_come or self._stories:
            while to_come and len(self._stories) < UNDER_WAY:
                self._stories.append(self._story())
                to_come -= 1
            at = self._chance.randrange(len(self._stories))
            event = next(self._stories[at], None)
            if event is None:
                self._stories[at] = self._stories[-1]
                self._stories.pop()
            else:
                yield event

    def _story(self) -> Iterator[Wire]:
        self._number += 1
        number, chance = self._number, self._chance
        task_id = str(uuid.UUID(int=chance.getrandbits(128), version=4))
        attempts = 2 if number % 20 == 0 else 1
        for attempt in range(attempts):
            node = chance.choice(self._nodes)
            described = {
                "name": NAMES[number % len(NAMES)],
                "args": f"({number}, {number + 1})",
                "kwargs": f"{{'customer': {number % 1000}}}",
                "root_id": task_id,
                "parent_id": None,
                "retries": attempt,
                "eta": None,
                "expires": None,
            }
            sent = {**described, "queue": "celery", "exchange": "", "routing_key": "celery"}
            yield self._tell("sent", task_id, ("gen77@client", 77, False), attempt, sent)
            yield self._tell("received", task_id, node, attempt, described)
            yield self._tell("started", task_id, node, attempt, {})
            error = {
                "exception": f"ValueError('{number}')",
                "traceback": "Traceback (most recent call last):\n" * 3,
            }
            if attempt + 1 < attempts:
                yield self._tell("retried", task_id, node, attempt, error)
            elif number % 25 == 0:
                yield self._tell("failed", task_id, node, attempt, error)
            else:
                ended = {"result": str(2 * number + 1), "runtime": 0.0123}
                yield self._tell("succeeded", task_id, node, attempt, ended)

    def _tell(self, kind: str, task_id: str, node: tuple[str, int, bool], attempt: int, fields: Wire) -> Wire:
        hostname, pid, is_celery = node
        self._clock += 1
        self._sequence += 1
        event = {
            "type": f"task-{kind}",
            "hostname": "".join(hostname),
            "pid": pid,
            "clock": self._clock,
            "timestamp": time.time() if self._began is None else self._began + self._clock / 10_000,
            "utcoffset": 0.0,
            "uuid": task_id,
            **fields,
        }
        if not is_celery:
            event |= {"inc": INCARNATION + pid, "seq": self._sequence, "retries": attempt}
        return event


def failures(tasks: int) -> int:
    return tasks // 25
