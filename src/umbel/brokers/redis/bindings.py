"""Bindings: which queues a message for an exchange goes to, as Celery keeps them in Redis (wire 2.3).

Redis has no exchanges: who binds a queue writes down that it did, and who publishes reads that and pushes
to the lists of all queues that fit. The set is read just before the message is sent, in a call of its own;
a queue that is bound in between is not reached, as with Celery.

Exchange types are stored nowhere, but a binding of a topic exchange has a pattern and one of a direct
exchange has none. A fanout exchange is a pub/sub channel in Celery: what is sent while nobody listens is
gone, so that no queue of tasks can be kept that way here.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from msgspec.structs import replace

from umbel.brokers.interface import Ack, Bury, DeclaredBinding, DeclaredQueue, Refused, Verdict
from umbel.brokers.redis.keys import Keys
from umbel.brokers.refusals import unbound
from umbel.errors import BrokerRefused
from umbel.wire.message import Outgoing

Command = Sequence[Any]
Tables = Mapping[str, Sequence[bytes]]
"""The binding sets of exchanges."""


@dataclass(slots=True)
class Routed:
    """Messages with the queues they go to, and by their places why others go nowhere."""

    batch: list[Outgoing] = field(default_factory=list)
    refused: dict[int, str] = field(default_factory=dict)


class Bindings:
    def __init__(self, keys: Keys, declared: Sequence[DeclaredQueue] = ()) -> None:
        self._keys = keys
        self._declared = {one.name: one for one in declared}
        bindings = [binding for one in declared for binding in one.bindings]
        self._fanouts = {one.exchange.name for one in bindings if one.exchange.kind == "fanout"}

    def problem(self, queue: str) -> str:
        """Why a queue cannot be consumed as it is declared; "" if it can."""
        declared = self._declared.get(queue)
        for one in declared.bindings if declared is not None else ():
            exchange = one.exchange.name
            if one.exchange.kind not in ("direct", "topic"):
                kind = one.exchange.kind
                return (
                    f"the queue {queue!r} is bound to the {kind} exchange {exchange!r}, which Umbel does not "
                    "support on Redis: use a direct or topic exchange, or RabbitMQ"
                )
            if self._keys.sep in one.routing_key or self._keys.sep in queue:
                return (
                    f"the binding of the queue {queue!r} to the exchange {exchange!r} for "
                    f"{one.routing_key!r} contains the separator {self._keys.sep!r} (transport option 'sep')"
                )
        return ""

    def declare(self, queues: Iterable[str]) -> list[Command]:
        """Make queues known: to us, and by their bindings to Celery, for good."""
        commands: list[Command] = []
        for queue in queues:
            commands.append(("SADD", self._keys.queues, queue))
            for exchange, member in self._members(queue):
                commands.append(("SADD", self._keys.binding(exchange), member))
                commands.append(("SADD", self._keys.permanent_binding(exchange), member))
        return commands

    def exchanges(self, batch: Iterable[Outgoing]) -> list[str]:
        """Those whose binding sets `route` needs."""
        return list(dict.fromkeys(one.exchange for one in batch if one.exchange))

    def read(self, exchanges: Iterable[str]) -> list[Command]:
        return [("SMEMBERS", self._keys.binding(exchange)) for exchange in exchanges]

    def route(self, batch: Sequence[Outgoing], tables: Tables) -> Routed:
        """Each message once for each queue that it reaches."""
        routed = Routed()
        for place, one in enumerate(batch):
            if not one.exchange:
                routed.batch.append(one)
                continue
            queues = self._matching(tables[one.exchange], one.routing_key)
            routed.batch += [replace(one, queue=queue) for queue in queues]
            if one.exchange in self._fanouts:
                routed.refused[place] = (
                    f"Umbel sends no tasks to a fanout exchange on Redis ({one.exchange!r})"
                )
            elif not queues:
                routed.refused[place] = unbound(one.exchange, one.routing_key)
        return routed

    def route_verdicts(
        self, verdicts: Sequence[Verdict], tables: Tables
    ) -> tuple[list[Verdict], list[Refused]]:
        """The verdicts with follow-ups that name their queues, and those that reach none."""
        judged: list[Verdict] = []
        refused: list[Refused] = []
        for verdict in verdicts:
            if isinstance(verdict, Ack | Bury) and verdict.follow_ups:
                routed = self.route(verdict.follow_ups, tables)
                refused += [Refused(verdict.follow_ups[place], why) for place, why in routed.refused.items()]
                judged.append(replace(verdict, follow_ups=routed.batch))
            else:
                judged.append(verdict)
        return judged, refused

    def _members(self, queue: str) -> list[tuple[str, str]]:
        """The exchanges that the queue is bound to, and the bindings as their sets have them."""
        declared = self._declared.get(queue)
        if declared is not None:
            return [
                (one.exchange.name, self._keys.binding_member(one.routing_key, _pattern(one), queue))
                for one in _bound(declared)
            ]
        if self._keys.sep in queue:  # every publisher would stumble over it
            return []
        return [(queue, self._keys.binding_member(queue, "", queue))]

    def _matching(self, members: Iterable[bytes], routing_key: str) -> list[str]:
        found = set()
        for member in members:
            parts = member.decode(errors="replace").split(self._keys.sep)
            if len(parts) == 3 and parts[2]:
                key, pattern, queue = parts
                if _compiled(pattern).match(routing_key) if pattern else key == routing_key:
                    found.add(queue)
        return sorted(found)


def refusal(refused: Mapping[int, str]) -> BrokerRefused:
    """One error for all that reach no queue; it tells of the first."""
    first = min(refused)
    more = f" (and {len(refused) - 1} more messages)" if len(refused) > 1 else ""
    return BrokerRefused(f"cannot send a message{more}: {refused[first]}", places=sorted(refused))


def pattern_of(binding_key: str) -> str:
    """A topic exchange's binding key as a regular expression, in the words of Celery 5.7."""
    words = [_WILDCARDS.get(word) or _escaped(word) for word in binding_key.split(".")]
    return "^" + r"\.".join(words) + "$"


_WILDCARDS = {"*": r"[^\.]+", "#": r".*?"}
_NEVER = re.compile(r"(?!)")


def _escaped(word: str) -> str:
    return "".join(one if one.isalnum() or one in "#*" else "\\" + one for one in word)


def _bound(declared: DeclaredQueue) -> list[DeclaredBinding]:
    return [one for one in declared.bindings if one.exchange.name]


def _pattern(binding: DeclaredBinding) -> str:
    return pattern_of(binding.routing_key) if binding.exchange.kind == "topic" else ""


@lru_cache(maxsize=1024)
def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error:  # of no program that we know
        return _NEVER
