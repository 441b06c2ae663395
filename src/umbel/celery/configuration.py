"""Configuration: convert the settings and queues of a Celery app to those of Umbel.

kombu's queues and exchanges become plain records, because Umbel's brokers must not import kombu.
"""

import os
from collections.abc import Iterable
from typing import Any

from msgspec.structs import replace

from umbel.app.app import App
from umbel.app.settings import Settings
from umbel.brokers.interface import BrokerSettings, DeclaredBinding, DeclaredExchange, DeclaredQueue
from umbel.brokers.options import changes_of, judge_options, judge_result_options
from umbel.celery.settings_table import TABLE
from umbel.errors import BadSetting
from umbel.text import without_password

# ---- queues ----------------------------------------------------------------------------------------
#
# What a Celery project declares (kombu's Queue and Exchange) as plain records for our brokers.


def consumed_names(app: Any) -> tuple[str, ...]:
    """Return the queues that a worker without -Q consumes."""
    return tuple(app.amqp.queues.consume_from)


def select_queues(app: Any, names: Iterable[str]) -> None:
    """Select the queues to consume. A queue that only -Q names is declared by the settings for missing
    queues.
    """
    try:
        app.amqp.queues.select(list(names))
    except KeyError as error:
        known = ", ".join(sorted(app.amqp.queues))
        problem = f"task_queues has no such queue, and task_create_missing_queues is False; it has {known}"
        raise BadSetting("--queues", error.args[0], problem, source="the command line") from None


def declared_queues(app: Any) -> tuple[DeclaredQueue, ...]:
    """Return all queues of the project, because a worker may be asked later to consume any of them."""
    return tuple(_declared(queue) for queue in app.amqp.queues.values())


def _declared(queue: Any) -> DeclaredQueue:
    bindings = [_binding(queue.exchange, queue.routing_key, queue.binding_arguments)]
    bindings += [
        _binding(binding.exchange, binding.routing_key, binding.arguments) for binding in queue.bindings or ()
    ]
    return DeclaredQueue(
        queue.name,
        durable=bool(queue.durable),
        auto_delete=bool(queue.auto_delete),
        exclusive=bool(queue.exclusive),
        arguments=_arguments(queue),
        bindings=tuple(binding for binding in bindings if binding.exchange.name),
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
    """Return the declared arguments. kombu has different names for some of RabbitMQ's arguments, and uses
    seconds instead of milliseconds.
    """
    named = {
        "x-expires": queue.expires and int(queue.expires * 1000),
        "x-message-ttl": queue.message_ttl and int(queue.message_ttl * 1000),
        "x-max-length": queue.max_length,
        "x-max-length-bytes": queue.max_length_bytes,
        "x-max-priority": queue.max_priority,
    }
    return {name: value for name, value in named.items() if value is not None} | (queue.queue_arguments or {})


def broker_settings(app: Any, settings: Settings) -> BrokerSettings:
    """Return the settings of Umbel's broker, with the queues and options of the project."""
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
    """Return Celery's prefetch count. It matters for tasks that expire: a worker that holds the task stores
    it as revoked, but RabbitMQ drops it silently.
    """
    concurrency = settings.worker_concurrency or os.cpu_count() or 1
    return int(app.conf.worker_prefetch_multiplier or 0) * concurrency


# ---- configuration ---------------------------------------------------------------------------------
#
# A Celery app's settings, as far as they are about the worker, as ours.

FOR_EVER_S = 10 * 365 * 86_400.0  # how long a stopping worker waits for its running tasks, as Celery's does


class StandsForCelery(App):
    """Represents a Celery app in commands: same broker, results and names, opened with its options."""

    def __init__(self, celery: Any, **settings: Any) -> None:
        super().__init__(celery.main or "celery", **settings)
        self._celery = celery

    def broker_settings(self) -> BrokerSettings:
        """Return the settings of Umbel's broker, with the project's queues."""
        return broker_settings(self._celery, self.settings)


def settings_of(app: Any) -> Settings:
    """Return the app's settings as Umbel's. They are read once and cached on the app."""
    return app_for(app).settings


def app_for(app: Any) -> App:
    """Return the `umbel.App` that represents this Celery app in commands. It is created once and cached on
    the app.
    """
    known = getattr(app, "umbel_app", None)
    if isinstance(known, App):
        return known
    given = {row.ours: row.value(app) for row in TABLE.values() if row.ours}
    given["worker_grace_s"] = FOR_EVER_S  # an early-acknowledged task would be lost if it were interrupted
    made = StandsForCelery(app, **{name: value for name, value in given.items() if value is not None})
    app.umbel_app = made
    return made


def shown_backend(app: Any) -> str:
    """Return the address of the result backend without its password."""
    return without_password(str(app.conf.result_backend or "disabled://"))
