"""RedisChords: the parts of chords under Celery's keys, so that both kinds of worker count them.

A part is the JSON text `[1, task id, state, value]`, scored by its place. The text is Celery's to the
letter: up to 5.6 it knows a part that it has counted by nothing else. Who brings the last part
claims the chord; a claim can be taken again by the same task, which is how a part that was
redelivered finishes what its former run began. Ending a chord pushes the body and marks it done in
one script.
"""

import json
import math
from collections.abc import Sequence
from typing import Any

import msgspec

from umbel.backends.interface import ChordPart
from umbel.brokers.interface import DeclaredQueue, Refused
from umbel.brokers.redis.bindings import Bindings
from umbel.brokers.redis.dead_letters import letters
from umbel.brokers.redis.keys import Keys
from umbel.brokers.redis.publishing import delivery_tags, sealed
from umbel.brokers.redis.scripts import script
from umbel.brokers.redis.sockets import SocketPool
from umbel.wire.message import Outgoing

CLAIM_S = 30
DONE_S = 300  # as Celery 5.7: long enough for the last redelivery of a part

_BURY = script("bury")


class RedisChords:
    def __init__(
        self, pool: SocketPool, keys: Keys, *, ttl_s: float, declared: Sequence[DeclaredQueue] = ()
    ) -> None:
        self._pool = pool
        self._keys = keys
        self._bindings = Bindings(keys, declared)
        self._ttl_s = max(1, math.ceil(ttl_s))

    def start(self, group_id: str, size: int) -> None:
        self._run("start", self._keys.chord(group_id), size, self._ttl_s)

    def add(self, part: ChordPart) -> list[ChordPart] | None:
        place = "+inf" if part.index is None else part.index
        mark = f"{part.task_id}:{part.index if part.index is not None else ''}"
        entry = json.dumps([1, part.task_id, part.status, json.loads(part.payload)])
        base = self._keys.chord(part.group_id)
        found = self._run("add", base, self._ttl_s, place, mark, entry)
        if not found:
            return None
        return [_read(part.group_id, place, one) for place, one in enumerate(found)]

    def grow(self, group_id: str, task_id: str) -> None:
        self._pool.run(self._keys.script("chord"), "grow", self._keys.chord(group_id), self._ttl_s, task_id)

    def claim(self, group_id: str, by: str) -> bool:
        return bool(self._run("claim", self._keys.chord(group_id), by, CLAIM_S))

    def end(self, group_id: str, batch: Sequence[Outgoing]) -> Sequence[Refused]:
        batch, astray = self._routed(batch)
        args: list[str | bytes] = []
        for outgoing, tag in zip(batch, delivery_tags(len(batch)), strict=True):
            args.append(self._keys.list_of(outgoing.queue, outgoing.message.priority))
            args.append(sealed(outgoing, tag, outgoing.not_before))
        reply = self._run("end", self._keys.chord(group_id), DONE_S, self._keys.prefix, *args)
        told = reply[1:] if reply else ()
        refused = [
            Refused(batch[place], why.decode(errors="replace"))
            for place, why in zip(told[::2], told[1::2], strict=True)
        ]
        return [*refused, *astray] if reply else []

    def _routed(self, batch: Sequence[Outgoing]) -> tuple[Sequence[Outgoing], list[Refused]]:
        """The messages with their queues; those that reach none are among the dead letters first."""
        if not (exchanges := self._bindings.exchanges(batch)):
            return batch, []
        read = self._bindings.read(exchanges)
        tables = self._pool.use(lambda connection: connection.call_all(read))
        routed = self._bindings.route(batch, dict(zip(exchanges, tables, strict=True)))
        astray = [Refused(batch[place], why) for place, why in routed.refused.items()]
        for args in letters(self._keys, astray):
            self._pool.run(_BURY, *args)
        return routed.batch, astray

    def _run(self, *args: object) -> Any:
        return self._pool.run(self._keys.script("chord"), *args)


def _read(group_id: str, place: int, entry: bytes) -> ChordPart:
    _, task_id, status, value = msgspec.json.decode(entry, type=tuple[int, str, str, msgspec.Raw])
    return ChordPart(group_id, place, task_id, status, bytes(value))
