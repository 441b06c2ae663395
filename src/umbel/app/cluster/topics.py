"""Topics: what an app's workers can be elected to do. The built-in one sends a task.

Every child of a pool loads this, so it leaves out what only workers and clients of elections need.
"""

from collections.abc import Callable, Mapping
from math import isfinite
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import NAMESPACE_URL, uuid5

from umbel.app.canvas.signature import Signature, signature_from
from umbel.errors import ConfigurationError, ElectionError

if TYPE_CHECKING:
    from umbel.app.interfaces import SendingApp
    from umbel.coordination.election_context import ElectionContext

TASK_TOPIC = "task"
TASK_IDS = "umbel:elections:celery"
POLICIES = (AT_MOST_ONCE, AT_LEAST_ONCE) = ("at_most_once", "at_least_once")
Handler = Callable[[Any, "ElectionContext"], Any]
HandlerT = TypeVar("HandlerT", bound=Callable[..., Any])


class Topics:
    """What an app's workers can be elected to do."""

    def __init__(self, app: "SendingApp") -> None:
        self.handlers: dict[str, Handler] = {
            TASK_TOPIC: lambda action, context: send_elected(app, action, context)
        }
        self._policies: dict[str, str] = {}

    def handler(self, topic: str, policy: str) -> Callable[[HandlerT], HandlerT]:
        def register(function: HandlerT) -> HandlerT:
            self._policies[topic] = checked_policy(policy)
            self.handlers[topic] = function
            return function

        return register

    def policy(self, topic: str) -> str:
        return self._policies.get(topic, AT_MOST_ONCE)


def checked_policy(given: str) -> str:
    if given not in POLICIES:
        raise ConfigurationError(
            f"election policy {given!r} is unknown; it must be one of {', '.join(POLICIES)}"
        )
    return given


def send_elected(app: "SendingApp", action: Any, context: "ElectionContext") -> str:
    """The built-in topic: send the signature, under one id however often this runs."""
    if not isinstance(action, Mapping):
        raise ElectionError(f"the action of topic {TASK_TOPIC!r} must be a signature, not {action!r}")
    call: Signature[Any] = signature_from(action, app).clone()
    task_id = call.freeze(_task_id(context.election_id))
    if isfinite(context.deadline()):  # the classic rules give no term that could fence anything
        fence = {"key": context.key, "term": context.term}
        call.options["headers"] = {**(call.options.get("headers") or {}), "fence": fence}
    app.publish(call.prepare())
    return task_id


def _task_id(election_id: str) -> str:
    return str(uuid5(uuid5(NAMESPACE_URL, TASK_IDS), election_id))
