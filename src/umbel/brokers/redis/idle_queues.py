"""IdleQueues: which queues are known to have nothing, so that nobody need ask.

The server was asked after them on the connection on which it tells of changes; until it tells of one,
nothing has changed. A worker of a thousand queues asks again only after those that something happened
to, and claims from no others.
"""

import math
from collections.abc import Iterable, Mapping, Sequence

from umbel.brokers.redis.keys import Keys


class IdleQueues:
    def __init__(self, keys: Keys) -> None:
        self._keys = keys
        self._due_at: dict[str, float] = {}  # of each queue: when its first delayed message is due
        self._queue_of: dict[bytes, str] = {}  # by each key of theirs
        self._told: set[str] = set()  # since `ask`
        self._until = 0.0

    def ask(self, queues: Sequence[str], now: float, lasts_s: float) -> Sequence[str]:
        """Those to ask after; all of them when it is time again, in case that something was not told."""
        if now >= self._until:
            self.forget(None)
            self._until = now + lasts_s
        asked = self.others(queues, now)
        for queue in asked:
            for key in (*self._keys.lists_of(queue), self._keys.delayed(queue)):
                self._queue_of[key.encode()] = queue
        self._told.clear()
        return asked

    def keep(self, due_at: Mapping[str, float]) -> float:
        """What was answered, but for queues that the server told of meanwhile. Until when it is believed."""
        self._due_at.update((queue, at) for queue, at in due_at.items() if queue not in self._told)
        return self._until

    def forget(self, keys: Iterable[bytes] | None) -> None:
        """These keys have changed, or None: anything may have."""
        if keys is None:
            self._told.update(self._queue_of.values())
            self._due_at.clear()
            self._queue_of.clear()
            self._until = 0.0
            return
        for key in keys:
            if (queue := self._queue_of.get(key)) is not None:
                self._told.add(queue)
                self._due_at.pop(queue, None)

    def others(self, queues: Sequence[str], now: float) -> Sequence[str]:
        """Those of which nothing is known, or that something is due in. All of them when it is time to ask
        again: who always has work does not wait, and would not notice that nobody tells it any more."""
        due_at = self._due_at
        if not due_at or now >= self._until:
            return queues
        return [queue for queue in queues if due_at.get(queue, 0.0) <= now]

    def first_due(self, queues: Iterable[str]) -> float:
        due_at = self._due_at
        return min((due_at.get(queue, math.inf) for queue in queues), default=math.inf)
