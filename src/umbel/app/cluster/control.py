"""app.control: query workers and send them commands, from blocking and from async code.

    app.control.ping()                                   [{"w1@host": {"ok": "pong"}}]
    app.control.inspect().active()                       {"w1@host": [...]}
    app.control.revoke(task_id, terminate=True)
    app.control.pause_queue("emails")
    await app.control.aio.ping()                         the same, awaited
    app.control.ask("stats", timeout=2).silent           the nodes that should have answered and did not

`timeout` is how long replies are waited for after the request was sent. A question ends earlier if every node
has answered that was named or is known to be a member. Connecting and sending may each take as long. Without
`timeout` it is 5 s; if the members are unknown, it ends after 1 s without a reply. Questions go out on a
separate connection, which a thread of the app opens when it is first needed.
"""

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from functools import partial, wraps
from time import monotonic
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypedDict, TypeVar, Unpack
from weakref import ref

from umbel.app.cluster.elections import ElectionOutcome, hold_election, make_election, refuse_untaken
from umbel.app.sending.signing import is_trusted
from umbel.brokers.interface import Broadcast, Broker, Pause
from umbel.brokers.registry import open_broker
from umbel.clock import cluster_now
from umbel.control.client import UNANSWERED_TTL_S, ControlClient, make_request
from umbel.control.failures import retry_one
from umbel.control.queue_pauses import PauseOutcome, move_messages, pause_queue, resume_queue
from umbel.errors import BrokerSilent, BrokerUnavailable, UmbelError
from umbel.protocol.pidbox import ANSWERS_S, Answers, Request
from umbel.wire.control import REQUEST_EXCHANGE, encode_request
from umbel.wire.values import decode_json

if TYPE_CHECKING:
    from umbel.app.app import App

T = TypeVar("T")
RepliesT = TypeVar("RepliesT")
SeenT = TypeVar("SeenT")
Replies = list[dict[str, Any]]
Work = Callable[[Broker, ControlClient], Awaitable[T]]
TaskIds = str | Iterable[str]

WAIT_S = 10.0  # for the end of an election
BROKER_S = 30.0
MOVE_S = 3600.0
CLOSE_S = 30.0
CLASSIC_ANSWER_S = 1.0
TIDY_S = 0.05  # so that the election's own timeout comes first
SLACK_S = 30.0  # the thread answers long before; if it does not, the caller must not hang

# ---- commands by name ------------------------------------------------------------------------------


class AskOptions(TypedDict, total=False):
    """Which workers are asked, and for how long: see `Control.ask`."""

    destination: Sequence[str] | None
    pattern: str | None
    matcher: str | None
    timeout: float | None
    limit: int | None


def _refuse_unknown(options: Mapping[str, Any], *also: str) -> None:
    """Raise TypeError for an unknown name: a misspelled `destination` would address all workers."""
    known = (*AskOptions.__annotations__, *also)
    if unknown := sorted(options.keys() - set(known)):
        raise TypeError(f"unexpected keyword argument {unknown[0]!r}; known: {', '.join(sorted(known))}")


class Commands(Generic[RepliesT, SeenT]):
    """The commands by name. `RepliesT` is what a broadcast returns: replies, or an awaitable of them."""

    def broadcast(
        self,
        command: str,
        arguments: dict[str, Any] | None = None,
        *,
        reply: bool = False,
        **options: Unpack[AskOptions],
    ) -> RepliesT:
        """Send a command to all workers, or to those named. Without `reply` nothing is waited for.

        `timeout`: how long replies are waited for; without it 5 s, or, if the members are unknown, until no
        reply has come for 1 s. It ends earlier when all have answered.
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
        options = AskOptions(
            destination=destination, timeout=timeout, pattern=pattern, matcher=matcher, limit=limit
        )
        return Inspect(partial(self._query, options))

    def ping(
        self, destination: Sequence[str] | None = None, timeout: float | None = None, **options: Any
    ) -> RepliesT:
        """Ask which workers are alive; each answers `pong`."""
        return self.broadcast("ping", destination=destination, timeout=timeout, reply=True, **options)

    def revoke(
        self, task_id: TaskIds, terminate: bool = False, signal: str | None = None, **options: Any
    ) -> RepliesT:
        """Prevent tasks from starting, also while no worker is running; `terminate` ends those that run.

        With `destination` or `pattern` only those workers are asked, and nothing is recorded.
        """
        arguments = {"terminate": True, "signal": signal or "SIGTERM"} if terminate else {}
        return self._revoke("revoke", task_id, arguments, options)

    def unrevoke(self, task_id: TaskIds, **options: Any) -> RepliesT:
        """Cancel a revoke, in the record and on the running workers.

        A task that was refused meanwhile is gone: send it again. Celery's workers have no such
        command, and may pass the revoke on to workers that start within three hours.
        """
        return self._revoke("unrevoke", task_id, {}, options)

    def terminate(self, task_id: TaskIds, signal: str | None = None, **options: Any) -> RepliesT:
        """Revoke tasks, and end those that are running."""
        return self.revoke(task_id, terminate=True, signal=signal, **options)

    def revoke_by_stamped_headers(
        self,
        headers: dict[str, Any],
        terminate: bool = False,
        signal: str | None = None,
        **options: Any,
    ) -> RepliesT:
        """Revoke all tasks whose stamps have one of these values."""
        arguments = {"headers": headers, "terminate": terminate, "signal": signal}
        return self.broadcast("revoke_by_stamped_headers", arguments, **options)

    def rate_limit(self, task_name: str, rate_limit: str | float, **options: Any) -> RepliesT:
        """Set how often each worker starts the task."""
        return self.broadcast("rate_limit", {"task_name": task_name, "rate_limit": rate_limit}, **options)

    def time_limit(
        self, task_name: str, soft: float | None = None, hard: float | None = None, **options: Any
    ) -> RepliesT:
        """Set the task's time limits in seconds, on each worker."""
        return self.broadcast("time_limit", {"task_name": task_name, "soft": soft, "hard": hard}, **options)

    def add_consumer(self, queue: str, **options: Any) -> RepliesT:
        """Have workers also consume this queue."""
        given = {name: options.pop(name) for name in _QUEUE_OPTIONS if name in options}
        return self.broadcast("add_consumer", {"queue": queue, **given}, **options)

    def cancel_consumer(self, queue: str, **options: Any) -> RepliesT:
        """Have workers stop consuming this queue."""
        return self.broadcast("cancel_consumer", {"queue": queue}, **options)

    def pool_grow(self, n: int = 1, **options: Any) -> RepliesT:
        """Add `n` children to the pool of each worker."""
        return self.broadcast("pool_grow", {"n": n}, **options)

    def pool_shrink(self, n: int = 1, **options: Any) -> RepliesT:
        """Remove `n` children from the pool of each worker."""
        return self.broadcast("pool_shrink", {"n": n}, **options)

    def pool_restart(self, modules: Sequence[str] | None = None, **options: Any) -> RepliesT:
        """Replace the children of each worker; needs `worker_pool_restarts`."""
        return self.broadcast("pool_restart", {"modules": list(modules or ())}, **options)

    def autoscale(self, max: int, min: int, **options: Any) -> RepliesT:
        """Let the pools grow and shrink between these sizes."""
        return self.broadcast("autoscale", {"max": max, "min": min}, **options)

    def enable_events(self, **options: Any) -> RepliesT:
        """Have workers send task events."""
        return self.broadcast("enable_events", **options)

    def disable_events(self, **options: Any) -> RepliesT:
        """Have workers stop sending task events."""
        return self.broadcast("disable_events", **options)

    def heartbeat(self, **options: Any) -> RepliesT:
        """Have workers send a heartbeat now."""
        return self.broadcast("heartbeat", **options)

    def shutdown(self, **options: Any) -> RepliesT:
        """Shut workers down after their running tasks; they do not answer."""
        return self.broadcast("shutdown", **options)

    def _revoke(self, command: str, task_id: TaskIds, arguments: dict[str, Any], options: Any) -> RepliesT:
        raise NotImplementedError

    def _query(self, options: AskOptions, command: str, arguments: dict[str, Any]) -> SeenT:
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


# ---- the connection for questions ------------------------------------------------------------------


class ControlThread:
    """A daemon thread with an event loop on which a broker connection is open.

    A forked child must not use it; the app in the child makes another.
    """

    def __init__(self, make_broker: Callable[[], Broker]) -> None:
        self.pid = os.getpid()
        self._make_broker = make_broker
        self._broker: Broker | None = None
        self._opening: asyncio.Task[tuple[Broker, ControlClient]] | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="umbel-control", daemon=True)
        self._thread.start()

    async def ask(
        self, command: str, arguments: dict[str, Any] | None, *, timeout_s: float | None, **options: Any
    ) -> Answers:
        """Ask workers. Connecting may take `timeout_s`, and the question as long again."""
        _, client = await self.opened(ANSWERS_S if timeout_s is None else timeout_s)
        return await client.ask(command, arguments, timeout_s=timeout_s, **options)

    async def opened(self, timeout_s: float) -> tuple[Broker, ControlClient]:
        """The connection, if it opens within the time. A broker that does not answer is retried until then.

        A refusal is raised at once. An attempt under way continues for the next caller.
        """
        deadline = self._loop.time() + timeout_s
        while True:
            if self._opening is None:
                self._opening = self._loop.create_task(self._open())
            opening = self._opening
            await asyncio.wait([opening], timeout=max(0.0, deadline - self._loop.time()))
            if not opening.done():
                raise BrokerUnavailable(f"the broker did not answer within {timeout_s:g} s; is it reachable?")
            if opening.exception() is None:
                return opening.result()
            self._opening = None if self._opening is opening else self._opening
            if not isinstance(opening.exception(), BrokerSilent):
                return opening.result()

    async def _open(self) -> tuple[Broker, ControlClient]:
        broker = self._make_broker()
        try:
            await broker.open()
        except (UmbelError, asyncio.CancelledError):
            await broker.close()
            raise
        self._broker = broker
        return broker, ControlClient(broker)

    def wait_for(self, work: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """Run work on the thread's loop and wait for it; BrokerUnavailable after `timeout_s`."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(timeout_s)
        except TimeoutError:
            if future.done():  # the work itself raised it
                raise
            future.cancel()
            raise BrokerUnavailable(
                f"the broker did not answer within {timeout_s:g} s; is it reachable?"
            ) from None

    def close(self) -> None:
        """Close the connection and end the thread; does nothing in a forked child."""
        if self.pid != os.getpid():
            return
        self.wait_for(self._close(), CLOSE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_S)

    async def _close(self) -> None:
        if self._opening is not None and not self._opening.done():
            self._opening.cancel()
            await asyncio.wait([self._opening])
        if self._broker is not None:
            await self._broker.close()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.close()


# ---- app.control -----------------------------------------------------------------------------------


class Control(Commands[Replies | None, dict[str, Any] | None]):
    """The commands for blocking code; `aio` has them for async code."""

    def __init__(self, app: "App") -> None:
        self._app = ref(app)  # the app refers to this object
        self._thread: ControlThread | None = None
        self._making = threading.Lock()
        self._clock = 0
        self.aio = AsyncControl(self)

    def ask(
        self, command: str, arguments: dict[str, Any] | None = None, **options: Unpack[AskOptions]
    ) -> Answers:
        """Ask, and return which workers answered, are silent or are unknown.

        `destination` names workers; `pattern` is matched with the names of all, as `matcher` says (`glob`,
        `pcre`). `timeout` is in seconds. `limit`: end when so many workers have answered.
        """
        _refuse_unknown(options)
        thread, timeout = self._open_thread(), options.pop("timeout", None)
        question = thread.ask(command, arguments, timeout_s=timeout, signed=is_trusted(), **options)
        return thread.wait_for(question, 3 * (ANSWERS_S if timeout is None else timeout) + SLACK_S)

    def broadcast(
        self,
        command: str,
        arguments: dict[str, Any] | None = None,
        *,
        reply: bool = False,
        **options: Unpack[AskOptions],
    ) -> Replies | None:
        """Send a command to workers; with `reply` return the replies in Celery's form."""
        _refuse_unknown(options)
        if reply:
            return as_list(self.ask(command, arguments, **options))
        nodes = options.get("destination"), options.get("pattern"), options.get("matcher")
        self._send(make_request(command, arguments, *nodes))
        return None

    def election(
        self,
        id: str,
        topic: str,
        action: Any = None,
        *,
        policy: str | None = None,
        expires: float | None = None,
        timeout: float = WAIT_S,
    ) -> ElectionOutcome:
        """Elect one worker to run the topic's handler with the action, and return the outcome.

        The election is stored in the broker first, so that nothing is lost, and asking again with the
        same id is always safe. `timeout=0` does not wait. Under `election_protocol = v1` the
        workers are asked, and the outcome is unknown.
        """
        app = self._the_app()
        request = make_election(app.topics, id, topic, action, policy, expires)
        if app.settings.election_protocol == "v1":
            classic = {"id": id, "topic": topic, "action": decode_json(request.action)}
            if timeout > 0:  # the outcome is unknown, but workers that cannot take part refuse
                refuse_untaken(topic, self.ask("election", classic, timeout=min(timeout, CLASSIC_ANSWER_S)))
            else:
                self._send(make_request("election", classic, None, None, None))
            return ElectionOutcome(id, "open")
        thread = self._open_thread()

        async def hold() -> ElectionOutcome:
            began = monotonic()
            broker, client = await thread.opened(timeout or WAIT_S)
            left_s = max(0.0, timeout - (monotonic() - began)) if timeout > 0 else timeout
            limit = asyncio.timeout(left_s + TIDY_S if timeout > 0 else None)
            try:
                async with limit:
                    return await hold_election(broker, client, request, left_s)
            except TimeoutError:
                if not limit.expired():  # the election itself has timed out
                    raise
                raise BrokerUnavailable(
                    f"the broker did not answer within {timeout:g} s; is it reachable?"
                ) from None

        return thread.wait_for(hold(), timeout + SLACK_S)

    def purge(self, *queues: str, timeout: float = WAIT_S) -> int:
        """Remove all waiting messages from the queues, and return how many; running tasks are not affected.

        Without names: from the queues that the app's tasks are sent to.
        """
        named = queues or self._the_app().task_queues()

        async def empty(broker: Broker, _: ControlClient) -> int:
            return sum([await broker.purge(queue) for queue in sorted(named)])

        return self._on_broker(empty, timeout)

    discard_all = purge

    def retry(self, task_id: str, *, reply_to: str | None = None, timeout: float = WAIT_S) -> str:
        """Send a failed task again, as a new task, and return its id; NotKept if its message is gone.

        `reply_to`: where the result goes, on backends that send results.
        """
        accept = self._the_app().settings.accept_content

        async def send_again(broker: Broker, _: ControlClient) -> str:
            return await retry_one(broker, task_id, accept=accept, reply_to=reply_to)

        return self._on_broker(send_again, timeout)

    def pause_queue(self, queue: str, *, timeout: float | None = None) -> PauseOutcome:
        """Let no worker take messages from the queue until it is resumed, also workers that start later.

        Tasks that were taken before still run, and senders can go on sending. Celery's workers are asked to
        stop consuming the queue. Their answers are waited for `timeout` seconds: by default 5, or 1 without
        any answer.
        """
        return self._on_broker(
            lambda broker, client: pause_queue(broker, client, queue, timeout_s=timeout),
            BROKER_S + 2 * _most_s(timeout),
        )

    def resume_queue(self, queue: str, *, timeout: float | None = None) -> PauseOutcome:
        """Let workers take messages from the queue again."""
        return self._on_broker(
            lambda broker, client: resume_queue(broker, client, queue, timeout_s=timeout),
            BROKER_S + _most_s(timeout),
        )

    def paused_queues(self) -> Mapping[str, Pause]:
        """The queues that are paused, since when, and which nodes were asked."""
        return self._on_broker(lambda broker, _: broker.paused(), BROKER_S)

    def move_messages(
        self, source: str, target: str, *, limit: int | None = None, timeout: float = MOVE_S
    ) -> int:
        """Move the messages that wait in one queue, due or not, to another; returns how many were moved."""
        return self._on_broker(lambda broker, _: move_messages(broker, source, target, limit=limit), timeout)

    def close(self) -> None:
        """Close the connection; the next question opens another."""
        with self._making:
            thread, self._thread = self._thread, None
        if thread is not None:
            thread.close()

    def _on_broker(self, work: Work[T], timeout_s: float) -> T:
        thread = self._open_thread()

        async def done() -> T:
            async with asyncio.timeout(timeout_s):
                broker, client = await thread.opened(timeout_s)
                return await work(broker, client)

        return thread.wait_for(done(), timeout_s + SLACK_S)

    def _send(self, request: Request) -> None:
        """Send a request that gets no replies; it needs no separate connection."""
        self._clock += 1
        signer = self._the_app().signing_cluster.signer() if is_trusted() else None
        headers, body = encode_request(request, self._clock, signer, cluster_now())
        self._the_app().producer.broadcast(
            [Broadcast(REQUEST_EXCHANGE, "", body, headers)], ttl_s=UNANSWERED_TTL_S
        )

    def _query(self, options: AskOptions, command: str, arguments: dict[str, Any]) -> dict[str, Any] | None:
        return dict(self.ask(command, arguments, **options).replies) or None

    def _revoke(
        self, command: str, task_id: TaskIds, arguments: dict[str, Any], options: Any
    ) -> Replies | None:
        """Record a revoke, or its end, that is for all workers; then send the command."""
        _refuse_unknown(options, "reply")
        revoked: dict[str, Any] = {"task_id": [task_id] if isinstance(task_id, str) else list(task_id)}
        if not (options.get("destination") or options.get("pattern")):
            expires_at = cluster_now() if command == "unrevoke" else None
            self._the_app().revoke(revoked["task_id"], expires_at=expires_at)
            revoked["recorded"] = True
        return self.broadcast(command, revoked | arguments, **options)

    def _open_thread(self) -> ControlThread:
        with self._making:
            if self._thread is None or self._thread.pid != os.getpid():
                settings = self._the_app().broker_settings()
                self._thread = ControlThread(lambda: open_broker(settings))
            return self._thread

    def _the_app(self) -> "App":
        app = self._app()
        assert app is not None, "an app outlives its control"
        return app


P = ParamSpec("P")


def _in_thread(
    method: Callable[Concatenate[Control, P], T],
) -> Callable[Concatenate["AsyncControl", P], Coroutine[Any, Any, T]]:
    """The method for async code: it runs in a thread."""

    @wraps(method)
    async def awaited(control: "AsyncControl", /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await asyncio.to_thread(method, control.blocking, *args, **kwargs)

    return awaited


class AsyncControl(Commands[Coroutine[Any, Any, Replies | None], Coroutine[Any, Any, dict[str, Any] | None]]):
    """The commands for async code. Questions run on the thread of `app.control`, not on the caller's loop."""

    def __init__(self, control: Control) -> None:
        self.blocking = control

    ask = _in_thread(Control.ask)
    broadcast = _in_thread(Control.broadcast)
    election = _in_thread(Control.election)
    purge = _in_thread(Control.purge)
    retry = _in_thread(Control.retry)
    pause_queue = _in_thread(Control.pause_queue)
    resume_queue = _in_thread(Control.resume_queue)
    paused_queues = _in_thread(Control.paused_queues)
    move_messages = _in_thread(Control.move_messages)
    _revoke = _in_thread(Control._revoke)
    _query = _in_thread(Control._query)


def as_list(answers: Answers) -> Replies:
    """Replies in Celery's form: a map for each node."""
    return [{node: value} for node, value in answers.replies.items()]


def _most_s(timeout_s: float | None) -> float:
    """How long one question takes at most: sending it, and waiting for the replies."""
    return 2 * (ANSWERS_S if timeout_s is None else timeout_s)
