"""The commands of remote control as methods, for code that waits and for async code alike.

What a method returns depends on who carries it out (`control.py`): replies, or an awaitable of them.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

from umbel.control.state import REVOKE_RETENTION_S

ToldT = TypeVar("ToldT")
SeenT = TypeVar("SeenT")
DEFAULT_TIMEOUT_S = 1.0
WAIT_S = 10.0  # for the end of an election

TaskIds = str | Iterable[str]


class Commands(Generic[ToldT, SeenT]):
    """The commands by name. `ToldT` is what telling gives: replies, or an awaitable of them."""

    def broadcast(
        self,
        command: str,
        arguments: dict[str, Any] | None = None,
        *,
        destination: Sequence[str] | None = None,
        pattern: str | None = None,
        matcher: str | None = None,
        reply: bool = False,
        timeout: float = DEFAULT_TIMEOUT_S,
        limit: int | None = None,
    ) -> ToldT:
        """Send a command to all workers, or to those named. Without `reply` nothing is waited for."""
        raise NotImplementedError

    def inspect(
        self,
        destination: Sequence[str] | None = None,
        timeout: float = DEFAULT_TIMEOUT_S,
        pattern: str | None = None,
        matcher: str | None = None,
        limit: int | None = None,
    ) -> "Inspect[SeenT]":
        """Questions that change nothing; each gives {node: reply}, or None when no worker answered."""
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
        """Have one worker do what the topic's handler does with the action, and say how it ended."""
        raise NotImplementedError

    def retry(self, task_id: str, *, reply_to: str | None = None, timeout: float = WAIT_S) -> Any:
        """Send a failed task again, as a new task, and return its id; NotKept if its message is not there."""
        raise NotImplementedError

    def ping(
        self, destination: Sequence[str] | None = None, timeout: float = DEFAULT_TIMEOUT_S, **options: Any
    ) -> ToldT:
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
            self._record(task_ids, retention_s=0.0)
            arguments["recorded"] = True
        return self.broadcast("unrevoke", arguments, **options)

    def terminate(self, task_id: TaskIds, signal: str | None = None, **options: Any) -> ToldT:
        return self.revoke(task_id, terminate=True, signal=signal, **options)

    def revoke_by_stamped_headers(
        self,
        headers: dict[str, Any],
        terminate: bool = False,
        signal: str | None = None,
        **options: Any,
    ) -> ToldT:
        arguments = {"headers": headers, "terminate": terminate, "signal": signal}
        return self.broadcast("revoke_by_stamped_headers", arguments, **options)

    def rate_limit(self, task_name: str, rate_limit: str | float, **options: Any) -> ToldT:
        return self.broadcast("rate_limit", {"task_name": task_name, "rate_limit": rate_limit}, **options)

    def time_limit(
        self, task_name: str, soft: float | None = None, hard: float | None = None, **options: Any
    ) -> ToldT:
        return self.broadcast("time_limit", {"task_name": task_name, "soft": soft, "hard": hard}, **options)

    def add_consumer(self, queue: str, **options: Any) -> ToldT:
        given = {name: options.pop(name) for name in _QUEUE_OPTIONS if name in options}
        return self.broadcast("add_consumer", {"queue": queue, **given}, **options)

    def cancel_consumer(self, queue: str, **options: Any) -> ToldT:
        return self.broadcast("cancel_consumer", {"queue": queue}, **options)

    def pool_grow(self, n: int = 1, **options: Any) -> ToldT:
        return self.broadcast("pool_grow", {"n": n}, **options)

    def pool_shrink(self, n: int = 1, **options: Any) -> ToldT:
        return self.broadcast("pool_shrink", {"n": n}, **options)

    def pool_restart(self, modules: Sequence[str] | None = None, **options: Any) -> ToldT:
        return self.broadcast("pool_restart", {"modules": list(modules or ())}, **options)

    def autoscale(self, max: int, min: int, **options: Any) -> ToldT:
        return self.broadcast("autoscale", {"max": max, "min": min}, **options)

    def enable_events(self, **options: Any) -> ToldT:
        return self.broadcast("enable_events", **options)

    def disable_events(self, **options: Any) -> ToldT:
        return self.broadcast("disable_events", **options)

    def heartbeat(self, **options: Any) -> ToldT:
        return self.broadcast("heartbeat", **options)

    def shutdown(self, **options: Any) -> ToldT:
        """Shut workers down after their running tasks; they do not answer."""
        return self.broadcast("shutdown", **options)

    def _record(self, task_ids: Sequence[str], *, retention_s: float = REVOKE_RETENTION_S) -> None:
        raise NotImplementedError


_QUEUE_OPTIONS = ("exchange", "exchange_type", "routing_key")


class Inspect(Generic[SeenT]):
    """`app.control.inspect()`: one method for each question, `query` for any other."""

    def __init__(self, ask: Callable[[str, dict[str, Any]], SeenT]) -> None:
        self._ask = ask

    def query(self, command: str, **arguments: Any) -> SeenT:
        return self._ask(command, arguments)

    def ping(self) -> SeenT:
        return self.query("ping")

    def clock(self) -> SeenT:
        return self.query("clock")

    def stats(self) -> SeenT:
        return self.query("stats")

    def report(self) -> SeenT:
        return self.query("report")

    def conf(self, with_defaults: bool = False) -> SeenT:
        return self.query("conf", with_defaults=with_defaults)

    def active(self, safe: bool = False) -> SeenT:
        return self.query("active", safe=safe)

    def reserved(self) -> SeenT:
        return self.query("reserved")

    def scheduled(self) -> SeenT:
        return self.query("scheduled")

    def revoked(self) -> SeenT:
        return self.query("revoked")

    def registered(self, *taskinfoitems: str) -> SeenT:
        return self.query("registered", taskinfoitems=list(taskinfoitems))

    registered_tasks = registered

    def active_queues(self) -> SeenT:
        return self.query("active_queues")

    def leases(self, *names: str) -> SeenT:
        return self.query("leases", names=list(names))

    def query_task(self, *ids: str | Sequence[str]) -> SeenT:
        flat = [one for given in ids for one in ([given] if isinstance(given, str) else given)]
        return self.query("query_task", ids=flat)

    def hello(self, from_node: str, revoked: Sequence[str] | None = None) -> SeenT:
        return self.query("hello", from_node=from_node, revoked=list(revoked or ()))
