"""Names: the topics and subscriptions that Celery 5.7 uses for queues and exchanges.

An exchange is a topic of its very name. A queue is a subscription of its exchange's topic: the prefix and
the queue's name, in which a dot is a dash and other punctuation an underscore. Messages have their routing
key as an attribute, and the subscription a filter for it. A queue of a fan-out exchange is a subscription
for each process, with an id behind its name.
"""

import re
import string
from collections.abc import Mapping
from dataclasses import dataclass

from umbel.brokers.interface import BrokerSettings, DeclaredQueue
from umbel.errors import BrokerRefused

DEAD = "umbel.dead"
ROUTING_KEY = "routing_key"
_PUNCTUATION = {ord(one): "_" for one in string.punctuation if one not in "_-."} | {ord("."): "-"}
_NAME = re.compile(r"(?!goog)[A-Za-z][A-Za-z0-9._~+%-]{2,254}")


@dataclass(frozen=True, slots=True)
class Place:
    """Where the messages of a queue go: a topic, with a routing key, and the subscription that keeps them."""

    queue: str
    topic: str
    routing_key: str
    subscription: str

    @property
    def filter(self) -> str:
        key = self.routing_key.replace("\\", "\\\\").replace('"', '\\"')
        return f'attributes.{ROUTING_KEY}="{key}"'


class Names:
    """The places of queues, as a project declares them or as Celery has them by default."""

    def __init__(self, settings: BrokerSettings) -> None:
        self._prefix = settings.queue_name_prefix
        self._declared: Mapping[str, DeclaredQueue] = {one.name: one for one in settings.declared}
        self._places: dict[str, Place] = {}

    def place(self, queue: str) -> Place:
        """Raises BrokerRefused for a queue that Pub/Sub cannot have."""
        found = self._places.get(queue)
        if found is None:
            found = self._places[queue] = self._place(queue)
        return found

    def _place(self, queue: str) -> Place:
        topic, key = queue, queue
        declared = self._declared.get(queue)
        bindings = declared.bindings if declared is not None else ()
        for binding in bindings[:1]:
            if binding.exchange.kind != "direct":
                raise BrokerRefused(
                    f"the queue {queue!r} is bound to the {binding.exchange.kind} exchange "
                    f"{binding.exchange.name!r}: on Pub/Sub tasks go by direct exchanges only"
                )
            topic, key = binding.exchange.name or queue, binding.routing_key
        if len(bindings) > 1:
            raise BrokerRefused(
                f"the queue {queue!r} has {len(bindings)} bindings: a subscription of Pub/Sub has one topic "
                "and one filter; declare a queue for each binding"
            )
        return Place(queue, checked(topic, queue), key, checked(self.subscription(queue), queue))

    def subscription(self, queue: str) -> str:
        name = queue if queue.startswith(self._prefix) else self._prefix + queue
        return name.translate(_PUNCTUATION)


def checked(name: str, queue: str) -> str:
    """The name, if Pub/Sub allows it."""
    if not _NAME.fullmatch(name):
        raise BrokerRefused(
            f"the queue {queue!r} cannot be on Pub/Sub, where it is called {name!r}: names have 3 to 255 "
            "letters, digits and . _ ~ + % -, begin with a letter and not with goog"
        )
    return name
