"""Declared: the task queues of a project, declared as the project does, and any other queue plainly.

RabbitMQ compares each declaration with what is there and refuses one that differs (406), so whoever
starts first decides for all. A queue that the project declares is therefore made exactly so, with its
exchanges and bindings.

Clients of a project with quorum queues send a delayed message not to its queue but to a ladder of
exchanges and queues (wire-protocol 3.4): level n holds a message for 2^n seconds if that bit of the
delay is set, and hands it to the next lower level. Whoever consumes makes the ladder, and binds to its
end the exchanges of the queues; those of direct exchanges are not delayed that way.
"""

from umbel.brokers.amqp.frames import Method
from umbel.brokers.amqp.topology import Binding, Call, Exchange, Queue, task_queue
from umbel.brokers.interface import BrokerSettings, DeclaredExchange, DeclaredQueue

DELAY_LEVELS = 28
DELAY_DELIVERY = Exchange("celery_delayed_delivery", "topic")
KNOWN_MAX = 1000
_LIMITED_BY_CONSUMER = ("quorum", "stream")  # they refuse a limit for the whole channel


class TaskQueues:
    """Every task queue by its name, and every exchange that messages are sent to."""

    def __init__(self, settings: BrokerSettings) -> None:
        self._declared = {one.name: one for one in settings.declared}
        self._queues = {one.name: _queue(one) for one in settings.declared}
        self._plain: dict[str, Queue] = {}
        bindings = [binding for one in settings.declared for binding in one.bindings]
        self._exchanges = {one.exchange.name: _exchange(one.exchange) for one in bindings}
        self._ladder_of = settings.delayed_delivery

    def queue(self, name: str) -> Queue:
        """One is asked for with every message, so the plain ones are remembered too."""
        found = self._queues.get(name) or self._plain.get(name)
        if found is None:
            if len(self._plain) >= KNOWN_MAX:
                self._plain.clear()
            found = self._plain[name] = task_queue(name)
        return found

    def exchange(self, name: str) -> Exchange:
        """As it is declared; one that is not is expected to be there."""
        return self._exchanges.get(name) or Exchange(name, "")

    def is_declared(self, name: str) -> bool:
        return name in self._queues

    def limits_each_consumer(self, name: str) -> bool:
        found = self._declared.get(name)
        return found is not None and found.arguments.get("x-queue-type") in _LIMITED_BY_CONSUMER

    @property
    def needs_ladder(self) -> bool:
        return any(one.is_quorum for one in self._declared.values())

    def ladder(self) -> list[Call]:
        return ladder(self._ladder_of)

    def ladder_bindings(self, name: str) -> list[Call]:
        """What lets the queue's delayed messages come from the end of the ladder."""
        queue = self._declared.get(name)
        if queue is None or queue.auto_delete:
            return []
        calls: list[Call] = []
        for one in queue.bindings:
            exchange = one.exchange.name
            if exchange and one.exchange.kind != "direct":
                key = one.routing_key if one.routing_key.startswith("#") else f"#.{one.routing_key}"
                calls.append((Method.EXCHANGE_BIND, (0, exchange, DELAY_DELIVERY.name, key, False, {})))
                calls.append((Method.QUEUE_BIND, (0, name, exchange, key, False, {})))
        return calls


def ladder(queue_type: str) -> list[Call]:
    """What declares the ladder, its longest level first; `queue_type`: quorum or classic."""
    declared: list[Call] = DELAY_DELIVERY.calls()
    bound: list[Call] = []
    for level in reversed(range(DELAY_LEVELS)):
        name, skipped = _level(level), "*." * (DELAY_LEVELS - 1 - level)
        next_name = _level(level - 1) if level else DELAY_DELIVERY.name
        arguments = {
            "x-queue-type": queue_type,
            "x-overflow": "reject-publish",
            "x-message-ttl": 2**level * 1000,
            "x-dead-letter-exchange": next_name,
        }
        if queue_type == "quorum":
            arguments["x-dead-letter-strategy"] = "at-least-once"
        exchange = Exchange(name, "topic")
        held = Queue(name, arguments=arguments, exchange=exchange, keys=(f"{skipped}1.#",))
        declared += held.calls()
        bound.append((Method.EXCHANGE_BIND, (0, next_name, name, f"{skipped}0.#", False, {})))
    return declared + bound


def mismatch(queue: str, text: str) -> str:
    """Why a queue cannot be declared as the project has it, and what to do."""
    return (
        f"it exists with other properties than the project declares: {text}; "
        f"declare it as it is there, or delete it when it is empty (rabbitmqctl delete_queue {queue})"
    )


def _level(level: int) -> str:
    return f"celery_delayed_{level}"


def _queue(declared: DeclaredQueue) -> Queue:
    return Queue(
        declared.name,
        durable=declared.durable,
        exclusive=declared.exclusive,
        auto_delete=declared.auto_delete,
        arguments=declared.arguments,
        bindings=tuple(
            Binding(_exchange(one.exchange), one.routing_key, one.arguments) for one in declared.bindings
        ),
        is_task=True,
        no_declare=declared.no_declare,
    )


def _exchange(declared: DeclaredExchange) -> Exchange:
    kind = "" if declared.no_declare else declared.kind
    return Exchange(declared.name, kind, declared.durable, declared.auto_delete, declared.arguments)
