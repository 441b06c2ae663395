"""DeclaredQueue: a queue as a project declares it, where that is not the plain queue of our own.

Other programs declare the same queues, and RabbitMQ closes the channel of whoever declares one
otherwise. So a broker that is handed such a record declares exactly that. Plain data: whoever reads a
project's settings fills it, and no broker knows where it comes from.
"""

from collections.abc import Mapping
from typing import Any

import msgspec


class DeclaredExchange(msgspec.Struct, frozen=True):
    """`kind`: direct, topic, fanout or headers. One with `no_declare` is expected to be there."""

    name: str
    kind: str = "direct"
    durable: bool = True
    auto_delete: bool = False
    arguments: Mapping[str, Any] = {}
    no_declare: bool = False


class DeclaredBinding(msgspec.Struct, frozen=True):
    exchange: DeclaredExchange
    routing_key: str = ""
    arguments: Mapping[str, Any] = {}


class DeclaredQueue(msgspec.Struct, frozen=True):
    """`arguments`: as RabbitMQ has them (x-max-priority, x-queue-type, x-message-ttl, ...)."""

    name: str
    durable: bool = True
    auto_delete: bool = False
    exclusive: bool = False
    arguments: Mapping[str, Any] = {}
    bindings: tuple[DeclaredBinding, ...] = ()
    no_declare: bool = False

    @property
    def is_quorum(self) -> bool:
        return self.arguments.get("x-queue-type") == "quorum"
