"""DeclaredQueue: a queue as a project declares it, where that is not the plain queue of our own.

Other programs declare the same queues, and RabbitMQ closes the channel of whoever declares one
otherwise. So a broker that is handed such a record declares exactly that. Plain data: whoever reads a
project's settings fills it, and no broker knows where it comes from.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class DeclaredExchange:
    """`kind`: direct, topic, fanout or headers. One with `no_declare` is expected to be there."""

    name: str
    kind: str = "direct"
    durable: bool = True
    auto_delete: bool = False
    arguments: Mapping[str, Any] = field(default_factory=dict)
    no_declare: bool = False


@dataclass(frozen=True, slots=True)
class DeclaredBinding:
    exchange: DeclaredExchange
    routing_key: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DeclaredQueue:
    """`arguments`: as RabbitMQ has them (x-max-priority, x-queue-type, x-message-ttl, ...)."""

    name: str
    durable: bool = True
    auto_delete: bool = False
    exclusive: bool = False
    arguments: Mapping[str, Any] = field(default_factory=dict)
    bindings: tuple[DeclaredBinding, ...] = ()
    no_declare: bool = False

    @property
    def is_quorum(self) -> bool:
        return self.arguments.get("x-queue-type") == "quorum"
