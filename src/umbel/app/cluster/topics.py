"""Topics: what the workers of an app can be elected to do. The built-in topic sends a task.

Every child of a pool loads this module, so it leaves out what only workers and clients of elections need.
"""

from collections.abc import Callable, Mapping
from math import isfinite
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import NAMESPACE_URL, uuid5

from msgspec.structs import replace

from umbel.app.canvas.signature import Signature, signature_from
from umbel.app.request import Request, RequestScope
from umbel.app.sending.signing import is_trusted
from umbel.clock import cluster_now
from umbel.errors import ConfigurationError, ElectionError
from umbel.protocol.delivery.trust import UNSIGNED, Signed, age_doubt
from umbel.wire.signing import HEADER as SIGNATURE
from umbel.wire.signing import Signer
from umbel.wire.values import decode_json, encode_json

if TYPE_CHECKING:
    from umbel.app.app import App
    from umbel.coordination.election_context import ElectionContext

TASK_TOPIC = "task"
TASK_IDS = "umbel:elections:celery"
POLICIES = (AT_MOST_ONCE, AT_LEAST_ONCE) = ("at_most_once", "at_least_once")
Handler = Callable[[Any, "ElectionContext"], Any]
HandlerT = TypeVar("HandlerT", bound=Callable[..., Any])


class Topics:
    """The handlers and default policies of an app's election topics."""

    def __init__(self, app: "App") -> None:
        self._app = app
        self.handlers: dict[str, Handler] = {
            TASK_TOPIC: lambda action, context: send_elected(app, action, context)
        }
        self._policies: dict[str, str] = {}

    def handler(self, topic: str, policy: str) -> Callable[[HandlerT], HandlerT]:
        """A decorator that registers the handler of a topic."""

        def register(function: HandlerT) -> HandlerT:
            self._policies[topic] = checked_policy(policy)
            self.handlers[topic] = function
            return function

        return register

    def action_of(self, election_id: str, topic: str, action: Any) -> Any:
        """The action as an election carries it. An action that sends a task is signed if there are keys."""
        if isinstance(action, Signature):
            action = action.to_map()
        if topic != TASK_TOPIC or not isinstance(action, Mapping) or not is_trusted():
            return action
        signer = self._app.signing_cluster.signer()
        if signer is None:
            return action
        return signer.sign_action(election_id, decode_json(encode_json(dict(action))), cluster_now())

    def policy(self, topic: str) -> str:
        """The default policy of a topic."""
        return self._policies.get(topic, AT_MOST_ONCE)


def checked_policy(given: str) -> str:
    """Return the policy unchanged; ConfigurationError if it is unknown."""
    if given not in POLICIES:
        raise ConfigurationError(
            f"election policy {given!r} is unknown; it must be one of {', '.join(POLICIES)}"
        )
    return given


def send_elected(app: "App", action: Any, context: "ElectionContext") -> str:
    """Handle the built-in topic: send the signature, with the same id however often this runs."""
    if not isinstance(action, Mapping):
        raise ElectionError(f"the action of topic {TASK_TOPIC!r} must be a signature, not {action!r}")
    signer = app.signing_cluster.signer()
    proof = _proof_of(app, signer, action, context.election_id)
    plain = {name: value for name, value in action.items() if name != SIGNATURE}
    call: Signature[Any] = signature_from(plain, app).clone()
    task_id = call.freeze(_task_id(context.election_id))
    if isfinite(context.deadline()):  # protocol v1 has no term that could serve as a fencing token
        fence = {"key": context.key, "term": context.term}
        call.options["headers"] = {**(call.options.get("headers") or {}), "fence": fence}
    # An election is not signed; only the action may be, by the client that opened it.
    with RequestScope(Request(id=context.election_id, signs_for=UNSIGNED)):
        batch = call.prepare()
        if signer is not None and proof is not None:
            # With fixed nonces, so that each message runs once, however often the handler runs.
            batch = [
                replace(
                    prepared,
                    outgoing=signer.sign_task(
                        prepared.outgoing, cluster_now(), nonce=f"{proof.mark}.{place}"
                    ),
                )
                for place, prepared in enumerate(batch)
            ]
        app.publish(batch)
    return task_id


def unsigned_action(action: bytes) -> Any:
    """The action without its signature, which differs between clients that ask for the same action."""
    found = decode_json(action)
    if isinstance(found, dict):
        found.pop(SIGNATURE, None)
    return found


def _proof_of(
    app: "App", signer: Signer | None, action: Mapping[str, Any], election_id: str
) -> Signed | None:
    """The signature of the client that opened the election; None if no key of ours made it, or if it is too
    old.
    """
    proof = None if signer is None else signer.check_action(election_id, action)
    if not isinstance(proof, Signed):
        return None
    return None if age_doubt(proof, cluster_now(), app.settings.signing_window_s) else proof


def _task_id(election_id: str) -> str:
    return str(uuid5(uuid5(NAMESPACE_URL, TASK_IDS), election_id))
