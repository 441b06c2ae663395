"""The commands of remote control as methods, for blocking and for async code.

What a method returns depends on the class that carries it out (`control.py`): replies, or an awaitable of
them.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import isfinite
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from uuid import NAMESPACE_URL, uuid5

from msgspec.structs import replace

from umbel.app.canvas.signature import Signature, signature_from
from umbel.app.request import Request, RequestScope
from umbel.app.sending.preparation import is_trusted, signed_once
from umbel.clock import cluster_now
from umbel.errors import ConfigurationError, ElectionError
from umbel.protocol.delivery.trust import UNSIGNED, Signed, age_doubt
from umbel.wire.signing import HEADER as SIGNATURE
from umbel.wire.values import decode_json, encode_json

if TYPE_CHECKING:
    from umbel.app.interfaces import SendingApp
    from umbel.coordination.election_context import ElectionContext


# ---- topics ----------------------------------------------------------------------------------------
#
# What an app's workers can be elected to do. The built-in topic sends a task.
#
# Every child of a pool loads this, so it leaves out what only workers and clients of elections need.

TASK_TOPIC = "task"
TASK_IDS = "umbel:elections:celery"
POLICIES = (AT_MOST_ONCE, AT_LEAST_ONCE) = ("at_most_once", "at_least_once")
Handler = Callable[[Any, "ElectionContext"], Any]
HandlerT = TypeVar("HandlerT", bound=Callable[..., Any])


class Topics:
    """The handlers and default policies of an app's election topics."""

    def __init__(self, app: "SendingApp") -> None:
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

    def asked(self, election_id: str, topic: str, action: Any) -> Any:
        """The action as an election carries it; one that sends a task is signed, where there are keys."""
        if isinstance(action, Signature):
            action = action.to_map()
        if topic != TASK_TOPIC or not isinstance(action, Mapping) or not is_trusted():
            return action
        signer = self._app.signer()
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


def send_elected(app: "SendingApp", action: Any, context: "ElectionContext") -> str:
    """Handle the built-in topic: send the signature, under one id however often this runs."""
    if not isinstance(action, Mapping):
        raise ElectionError(f"the action of topic {TASK_TOPIC!r} must be a signature, not {action!r}")
    proof = _proof_of(app, action, context.election_id)
    plain = {name: value for name, value in action.items() if name != SIGNATURE}
    call: Signature[Any] = signature_from(plain, app).clone()
    task_id = call.freeze(_task_id(context.election_id))
    if isfinite(context.deadline()):  # protocol v1 has no term that could serve as a fencing token
        fence = {"key": context.key, "term": context.term}
        call.options["headers"] = {**(call.options.get("headers") or {}), "fence": fence}
    # An election is not signed; only the action may be, by the client that opened it.
    with RequestScope(Request(id=context.election_id, signs_for=UNSIGNED)):
        prepared = call.prepare()
        if proof is not None:
            asked = enumerate(prepared)
            prepared = [
                replace(message, outgoing=signed_once(app, message.outgoing, f"{proof.mark}.{place}"))
                for place, message in asked
            ]
        app.publish(prepared)
    return task_id


def unsigned_action(action: bytes) -> Any:
    """The action without its signature: clients that ask for the same action sign it at different times."""
    found = decode_json(action)
    if isinstance(found, dict):
        found.pop(SIGNATURE, None)
    return found


def _proof_of(app: "SendingApp", action: Mapping[str, Any], election_id: str) -> Signed | None:
    """The signature of the client that opened the election; None without one of our keys, or if it is too
    old.
    """
    signer = app.signer()
    proof = None if signer is None else signer.check_action(election_id, action)
    if not isinstance(proof, Signed):
        return None
    return None if age_doubt(proof, cluster_now(), app.settings.signing_window_s) else proof


def _task_id(election_id: str) -> str:
    return str(uuid5(uuid5(NAMESPACE_URL, TASK_IDS), election_id))


# ---- commands --------------------------------------------------------------------------------------
#
# The commands of remote control as methods, for blocking and for async code.
#
# What a method returns depends on the class that carries it out (`control.py`): replies, or an awaitable of
# them.

ToldT = TypeVar("ToldT")
SeenT = TypeVar("SeenT")
WAIT_S = 10.0  # for the end of an election

TaskIds = str | Iterable[str]


class Commands(Generic[ToldT, SeenT]):
    """The commands by name. `ToldT` is what a broadcast returns: replies, or an awaitable of them."""

    def broadcast(
        self,
        command: str,
        arguments: dict[str, Any] | None = None,
        *,
        destination: Sequence[str] | None = None,
        pattern: str | None = None,
        matcher: str | None = None,
        reply: bool = False,
        timeout: float | None = None,
        limit: int | None = None,
    ) -> ToldT:
        """Send a command to all workers, or to those named. Without `reply` nothing is waited for.

        `timeout`: how long replies are waited for; without it 5 s, and where the members are unknown until no
        reply came for 1 s. It ends earlier when all have answered.
        """
        raise NotImplementedError

    def inspect(
        self,
        destination: Sequence[str] | None = None,
        timeout: float | None = None,
        pattern: str | None = None,
        matcher: str | None = None,
        limit: int | None = None,
    ) -> "Inspect[SeenT]":
        """Questions that change nothing; each returns {node: reply}, or None when no worker answered."""
        raise NotImplementedError

    def election(
        self,
        id: str,
        topic: str,
        action: Any = None,
        *,
        policy: str | None = None,
        expires: float | None = None,
        timeout: float = WAIT_S,
    ) -> Any:
        """Have one worker run the topic's handler with the action, and return how it ended."""
        raise NotImplementedError

    def retry(self, task_id: str, *, reply_to: str | None = None, timeout: float = WAIT_S) -> Any:
        """Send a failed task again, as a new task, and return its id; NotKept if its message is gone."""
        raise NotImplementedError

    def ping(
        self, destination: Sequence[str] | None = None, timeout: float | None = None, **options: Any
    ) -> ToldT:
        """Ask which workers are alive; each answers `pong`."""
        return self.broadcast("ping", destination=destination, timeout=timeout, reply=True, **options)

    def revoke(
        self, task_id: TaskIds, terminate: bool = False, signal: str | None = None, **options: Any
    ) -> ToldT:
        """Prevent tasks from starting, also while no worker is running; `terminate` ends those that run.

        With `destination` or `pattern` only those workers are asked, and nothing is recorded.
        """
        task_ids = [task_id] if isinstance(task_id, str) else list(task_id)
        arguments: dict[str, Any] = {"task_id": task_ids}
        if terminate:
            arguments |= {"terminate": True, "signal": signal or "SIGTERM"}
        if not options.get("destination") and not options.get("pattern"):
            self._record(task_ids)
            arguments["recorded"] = True
        return self.broadcast("revoke", arguments, **options)

    def unrevoke(self, task_id: TaskIds, **options: Any) -> ToldT:
        """Cancel a revoke, in the record and on the running workers.

        A task that was refused meanwhile is gone: send it again. Celery's workers have no such
        command, and may pass the revoke on to workers that start within three hours.
        """
        task_ids = [task_id] if isinstance(task_id, str) else list(task_id)
        arguments: dict[str, Any] = {"task_id": task_ids}
        if not options.get("destination") and not options.get("pattern"):
            self._record(task_ids, undo=True)
            arguments["recorded"] = True
        return self.broadcast("unrevoke", arguments, **options)

    def terminate(self, task_id: TaskIds, signal: str | None = None, **options: Any) -> ToldT:
        """Revoke tasks, and end those that run."""
        return self.revoke(task_id, terminate=True, signal=signal, **options)

    def revoke_by_stamped_headers(
        self,
        headers: dict[str, Any],
        terminate: bool = False,
        signal: str | None = None,
        **options: Any,
    ) -> ToldT:
        """Revoke all tasks whose stamps have one of these values."""
        arguments = {"headers": headers, "terminate": terminate, "signal": signal}
        return self.broadcast("revoke_by_stamped_headers", arguments, **options)

    def rate_limit(self, task_name: str, rate_limit: str | float, **options: Any) -> ToldT:
        """Set how often each worker starts the task."""
        return self.broadcast("rate_limit", {"task_name": task_name, "rate_limit": rate_limit}, **options)

    def time_limit(
        self, task_name: str, soft: float | None = None, hard: float | None = None, **options: Any
    ) -> ToldT:
        """Set the task's time limits in seconds, on each worker."""
        return self.broadcast("time_limit", {"task_name": task_name, "soft": soft, "hard": hard}, **options)

    def add_consumer(self, queue: str, **options: Any) -> ToldT:
        """Have workers also consume this queue."""
        given = {name: options.pop(name) for name in _QUEUE_OPTIONS if name in options}
        return self.broadcast("add_consumer", {"queue": queue, **given}, **options)

    def cancel_consumer(self, queue: str, **options: Any) -> ToldT:
        """Have workers stop consuming this queue."""
        return self.broadcast("cancel_consumer", {"queue": queue}, **options)

    def pool_grow(self, n: int = 1, **options: Any) -> ToldT:
        """Add `n` children to the pool of each worker."""
        return self.broadcast("pool_grow", {"n": n}, **options)

    def pool_shrink(self, n: int = 1, **options: Any) -> ToldT:
        """Remove `n` children from the pool of each worker."""
        return self.broadcast("pool_shrink", {"n": n}, **options)

    def pool_restart(self, modules: Sequence[str] | None = None, **options: Any) -> ToldT:
        """Replace the children of each worker; needs `worker_pool_restarts`."""
        return self.broadcast("pool_restart", {"modules": list(modules or ())}, **options)

    def autoscale(self, max: int, min: int, **options: Any) -> ToldT:
        """Let the pools grow and shrink between these sizes."""
        return self.broadcast("autoscale", {"max": max, "min": min}, **options)

    def enable_events(self, **options: Any) -> ToldT:
        """Have workers send task events."""
        return self.broadcast("enable_events", **options)

    def disable_events(self, **options: Any) -> ToldT:
        """Have workers stop sending task events."""
        return self.broadcast("disable_events", **options)

    def heartbeat(self, **options: Any) -> ToldT:
        """Have workers send a heartbeat now."""
        return self.broadcast("heartbeat", **options)

    def shutdown(self, **options: Any) -> ToldT:
        """Shut workers down after their running tasks; they do not answer."""
        return self.broadcast("shutdown", **options)

    def _record(self, task_ids: Sequence[str], *, undo: bool = False) -> None:
        raise NotImplementedError


_QUEUE_OPTIONS = ("exchange", "exchange_type", "routing_key")


class Inspect(Generic[SeenT]):
    """The value of `app.control.inspect()`: one method for each question, `query` for any other."""

    def __init__(self, ask: Callable[[str, dict[str, Any]], SeenT]) -> None:
        self._ask = ask

    def query(self, command: str, **arguments: Any) -> SeenT:
        """Ask by the command's name."""
        return self._ask(command, arguments)

    def ping(self) -> SeenT:
        """Which workers answer."""
        return self.query("ping")

    def clock(self) -> SeenT:
        """The logical clock of each worker."""
        return self.query("clock")

    def stats(self) -> SeenT:
        """Counters, pool, broker and resources of each worker."""
        return self.query("stats")

    def report(self) -> SeenT:
        """A text for bug reports from each worker."""
        return self.query("report")

    def conf(self, with_defaults: bool = False) -> SeenT:
        """The settings of each worker, without passwords."""
        return self.query("conf", with_defaults=with_defaults)

    def active(self, safe: bool = False) -> SeenT:
        """The tasks that run now."""
        return self.query("active", safe=safe)

    def reserved(self) -> SeenT:
        """The tasks that workers have claimed and not started."""
        return self.query("reserved")

    def scheduled(self) -> SeenT:
        """The tasks that a worker has parked until they are due."""
        return self.query("scheduled")

    def revoked(self) -> SeenT:
        """The ids of revoked tasks that each worker knows."""
        return self.query("revoked")

    def registered(self, *taskinfoitems: str) -> SeenT:
        """The tasks that each worker can run."""
        return self.query("registered", taskinfoitems=list(taskinfoitems))

    registered_tasks = registered

    def active_queues(self) -> SeenT:
        """The queues that each worker consumes."""
        return self.query("active_queues")

    def leases(self, *names: str) -> SeenT:
        """Holder and term of the named leases, or of the cluster's own that are held."""
        return self.query("leases", names=list(names))

    def query_task(self, *ids: str | Sequence[str]) -> SeenT:
        """Where tasks with these ids are: active, reserved or scheduled."""
        flat = [task_id for given in ids for task_id in ([given] if isinstance(given, str) else given)]
        return self.query("query_task", ids=flat)

    def hello(self, from_node: str, revoked: Sequence[str] | None = None) -> SeenT:
        """Exchange revokes, clock and members with the workers, as a node that starts does."""
        return self.query("hello", from_node=from_node, revoked=list(revoked or ()))
