"""Queues: what a Celery project declares (kombu's Queue and Exchange) as plain records for our brokers."""

import os
from collections.abc import Iterable
from typing import Any

from msgspec.structs import replace

from umbel.app.configuration.settings import Settings
from umbel.brokers.interface import BrokerSettings, DeclaredBinding, DeclaredExchange, DeclaredQueue
from umbel.brokers.options import changes_of, judge_options, judge_result_options
from umbel.errors import BadSetting


def consumed_names(app: Any) -> tuple[str, ...]:
    """The queues that a worker without -Q consumes from."""
    return tuple(app.amqp.queues.consume_from)


def select_queues(app: Any, names: Iterable[str]) -> None:
    """Consume these. One that only -Q names is declared as the settings say of missing ones."""
    try:
        app.amqp.queues.select(list(names))
    except KeyError as error:
        known = ", ".join(sorted(app.amqp.queues))
        problem = f"task_queues has no such queue, and task_create_missing_queues is False; it has {known}"
        raise BadSetting("--queues", error.args[0], problem, source="the command line") from None


def declared_queues(app: Any) -> tuple[DeclaredQueue, ...]:
    """Every queue that the project knows: a worker may be told later to consume one of them."""
    return tuple(_declared(queue) for queue in app.amqp.queues.values())


def _declared(queue: Any) -> DeclaredQueue:
    bindings = [_binding(queue.exchange, queue.routing_key, queue.binding_arguments)]
    bindings += [_binding(one.exchange, one.routing_key, one.arguments) for one in queue.bindings or ()]
    return DeclaredQueue(
        queue.name,
        durable=bool(queue.durable),
        auto_delete=bool(queue.auto_delete),
        exclusive=bool(queue.exclusive),
        arguments=_arguments(queue),
        bindings=tuple(one for one in bindings if one.exchange.name),
        no_declare=bool(queue.no_declare),
    )


def _binding(exchange: Any, routing_key: Any, arguments: Any) -> DeclaredBinding:
    if exchange is None:
        return DeclaredBinding(DeclaredExchange(""))
    declared = DeclaredExchange(
        exchange.name or "",
        kind=exchange.type or "direct",
        durable=bool(exchange.durable),
        auto_delete=bool(exchange.auto_delete),
        arguments=exchange.arguments or {},
        no_declare=bool(exchange.no_declare),
    )
    return DeclaredBinding(declared, routing_key or "", arguments or {})


def _arguments(queue: Any) -> dict[str, Any]:
    """kombu has names of its own for some of RabbitMQ's arguments, in seconds where those are in ms."""
    named = {
        "x-expires": queue.expires and int(queue.expires * 1000),
        "x-message-ttl": queue.message_ttl and int(queue.message_ttl * 1000),
        "x-max-length": queue.max_length,
        "x-max-length-bytes": queue.max_length_bytes,
        "x-max-priority": queue.max_priority,
    }
    return {name: value for name, value in named.items() if value is not None} | (queue.queue_arguments or {})


def broker_settings(app: Any, settings: Settings) -> BrokerSettings:
    """Our broker, laid out as the project has it."""
    conf = app.conf
    layout: dict[str, Any] = {
        "declared": declared_queues(app),
        "result_key_prefix": "",
        "delayed_delivery": conf.broker_native_delayed_delivery_queue_type,
        "prefetch_floor": _held_by_celery(app, settings),
        **changes_of(judge_options(settings.broker, conf.broker_transport_options or {})),
        **changes_of(judge_result_options(conf.result_backend_transport_options or {})),
    }
    return replace(settings.for_broker(), **layout)


def _held_by_celery(app: Any, settings: Settings) -> int:
    """What expires while a worker holds it is stored as revoked; RabbitMQ drops the rest in silence."""
    concurrency = settings.worker_concurrency or os.cpu_count() or 1
    return int(app.conf.worker_prefetch_multiplier or 0) * concurrency
