"""Cluster limits as a task states them, tied to the parameters of its function."""

import inspect
from collections.abc import Sequence

from umbel.app.options import TaskOptions
from umbel.brokers.interface import BrokerSettings
from umbel.brokers.registry import check_limits_on
from umbel.errors import ConfigurationError
from umbel.protocol.delivery.limits import ClusterLimit, Concurrency, Field, check_names

_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def check_limit(own: TaskOptions, broker: BrokerSettings) -> None:
    """Refuse to send a task with a limit by way of a broker that cannot keep it."""
    if own.cluster_limit is not None:
        check_limits_on(broker, own.cluster_limit.task)


def limit_of(task: str, options: TaskOptions, parameters: Sequence[inspect.Parameter]) -> ClusterLimit | None:
    """`parameters` are those that a caller sees."""
    stated = options.limit
    if stated is None:
        return None
    if isinstance(stated, Concurrency) and options.acks_early:
        raise ConfigurationError(
            f"task {task!r} has limit={stated!r} and acks_early: a message that is acknowledged holds no "
            "slot; leave acks_early out, or use Rate"
        )
    named = {one.name: one for one in parameters if one.kind in _NAMED}
    check_names(task, stated, tuple(named), options.sensitive)
    places = {one.name: place for place, one in enumerate(parameters) if one.kind is _NAMED[0]}
    fields = tuple(Field(name, places.get(name), *_default(named[name])) for name in stated.names)
    return ClusterLimit(task, stated.key, fields, stated.terms)


def _default(parameter: inspect.Parameter) -> tuple[object, bool]:
    if parameter.default is inspect.Parameter.empty:
        return None, False
    return parameter.default, True
