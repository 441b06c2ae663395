"""app.control: query workers and send them commands, from blocking and from async code.

    app.control.ping()                                   [{"w1@host": {"ok": "pong"}}]
    app.control.inspect().active()                       {"w1@host": [...]}
    app.control.revoke(task_id, terminate=True)
    app.control.pause_queue("emails")
    await app.control.aio.ping()                         the same, awaited
    app.control.ask("stats", timeout=2).silent           the nodes that should have answered and did not

`timeout` is how long replies are waited for, from when the request was sent; a question is over earlier when
every node has answered that was named or is known to be a member. Connecting and sending may each take as
long. Without `timeout` it is 5 s, and where the members are unknown until no reply came for 1 s. Questions go
out on a separate connection, which one thread of the app opens when it is first needed.
"""

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from time import monotonic
from typing import Any, Protocol, TypeVar
from weakref import ref

from umbel.app.cluster.commands import WAIT_S, Commands, Inspect, TaskIds, Topics
from umbel.app.cluster.elections import ElectionOutcome, hold_election, make_election, refuse_untaken
from umbel.app.sending.preparation import is_trusted
from umbel.app.settings import Settings
from umbel.brokers.interface import Broadcast, Broker, BrokerSettings, Pause, Producer
from umbel.brokers.registry import open_broker
from umbel.clock import cluster_now
from umbel.control.client import UNANSWERED_TTL_S, ControlClient, make_request
from umbel.control.failures import retry_one
from umbel.control.queue_pauses import PauseOutcome, move_messages, pause_queue, resume_queue
from umbel.errors import BrokerSilent, BrokerUnavailable, UmbelError
from umbel.protocol.pidbox import ANSWERS_S, Answers, Request
from umbel.wire.control import REQUEST_EXCHANGE, encode_request
from umbel.wire.signing import Signer
from umbel.wire.values import decode_json

# ---- queue commands --------------------------------------------------------------------------------
#
# The commands about whole queues, which the broker carries out: pause, resume, move.

T = TypeVar("T")
BROKER_S = 30.0
MOVE_S = 3600.0

Work = Callable[[Broker, ControlClient], Awaitable[T]]


class QueueCommands:
    """The queue commands for blocking code; a subclass says how work reaches the broker."""

    def _on_broker(self, work: Work[T], timeout_s: float) -> T:
        raise NotImplementedError

    def pause_queue(self, queue: str, *, timeout: float | None = None) -> PauseOutcome:
        """Let no worker take messages from the queue until it is resumed, whenever the worker starts.

        Tasks that were taken before run; senders can go on sending. Celery's workers are asked to stop
        consuming it, and their answers are waited for `timeout` seconds: by default 5, or 1 without any.
        """
        return self._on_broker(
            lambda broker, asker: pause_queue(broker, asker, queue, timeout_s=timeout),
            BROKER_S + 2 * _most_s(timeout),
        )

    def resume_queue(self, queue: str, *, timeout: float | None = None) -> PauseOutcome:
        """Let workers take messages from the queue again."""
        return self._on_broker(
            lambda broker, asker: resume_queue(broker, asker, queue, timeout_s=timeout),
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


class AsyncQueueCommands:
    """The queue commands for async code."""

    def __init__(self, commands: QueueCommands) -> None:
        self._commands = commands

    async def pause_queue(self, queue: str, *, timeout: float | None = None) -> PauseOutcome:
        """Let no worker take messages from the queue until it is resumed."""
        return await asyncio.to_thread(self._commands.pause_queue, queue, timeout=timeout)

    async def resume_queue(self, queue: str, *, timeout: float | None = None) -> PauseOutcome:
        """Let workers take messages from the queue again."""
        return await asyncio.to_thread(self._commands.resume_queue, queue, timeout=timeout)

    async def paused_queues(self) -> Mapping[str, Pause]:
        """The queues that are paused, since when, and which nodes were asked."""
        return await asyncio.to_thread(self._commands.paused_queues)

    async def move_messages(
        self, source: str, target: str, *, limit: int | None = None, timeout: float = MOVE_S
    ) -> int:
        """Move the messages that wait in one queue to another, and return how many were moved."""
        move = self._commands.move_messages
        return await asyncio.to_thread(move, source, target, limit=limit, timeout=timeout)


def _most_s(timeout_s: float | None) -> float:
    """How long one question takes at most: sending it, and waiting for the replies."""
    return 2 * (ANSWERS_S if timeout_s is None else timeout_s)


# ---- control thread --------------------------------------------------------------------------------
#
# A connection for questions to workers, in a separate thread.

CLOSE_S = 30.0


class ControlThread:
    """A daemon thread with an event loop on which a broker connection is open.

    A forked child must not use it: its app makes another.
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
        _, asker = await self.opened(ANSWERS_S if timeout_s is None else timeout_s)
        return await asker.ask(command, arguments, timeout_s=timeout_s, **options)

    async def opened(self, timeout_s: float) -> tuple[Broker, ControlClient]:
        """The connection, if it opens within the time. A broker that does not answer is retried until then.

        A refusal is raised at once. An attempt under way continues for the next caller.
        """
        ends = self._loop.time() + timeout_s
        while True:
            if self._opening is None:
                self._opening = self._loop.create_task(self._open())
            opening = self._opening
            await asyncio.wait([opening], timeout=max(0.0, ends - self._loop.time()))
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
            if future.done():  # the work's own
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
#
# Query workers and send them commands, from blocking and from async code.

CLASSIC_ANSWER_S = 1.0
TIDY_S = 0.05  # so that the election's own timeout comes first
SLACK_S = 30.0  # the thread answers long before; if it does not, the caller must not hang

Replies = list[dict[str, Any]]


class ControlledApp(Protocol):
    """What remote control needs of the app."""

    @property
    def settings(self) -> Settings:
        """The app's settings, read for the election protocol and accepted content."""

    def broker_settings(self) -> BrokerSettings:
        """The settings with which the control connection is opened."""

    def signer(self) -> Signer | None:
        """What requests are signed with; None without keys."""

    @property
    def producer(self) -> Producer:
        """The blocking producer, for requests that get no replies."""

    @property
    def topics(self) -> Topics:
        """The election topics, with their default policies."""

    def task_queues(self) -> Collection[str]:
        """The queues that the app's tasks are sent to."""

    def revoke(self, task_ids: Iterable[str], *, expires_at: float | None = None) -> None:
        """Record revoked tasks in the broker."""


class Control(Commands[Replies | None, dict[str, Any] | None], QueueCommands):
    """The commands for blocking code; `aio` has them for async code."""

    def __init__(self, app: ControlledApp) -> None:
        self._app = ref(app)  # the app refers to this object
        self._thread: ControlThread | None = None
        self._making = threading.Lock()
        self._clock = 0
        self.aio = AsyncControl(self)

    def ask(
        self,
        command: str,
        arguments: dict[str, Any] | None = None,
        *,
        destination: Sequence[str] | None = None,
        pattern: str | None = None,
        matcher: str | None = None,
        timeout: float | None = None,
        limit: int | None = None,
    ) -> Answers:
        """Ask, and return which workers answered, are silent or are unknown."""
        thread = self._open_thread()
        asked = thread.ask(
            command,
            arguments,
            destination=destination,
            pattern=pattern,
            matcher=matcher,
            timeout_s=timeout,
            limit=limit,
            signed=is_trusted(),
        )
        most_s = ANSWERS_S if timeout is None else timeout
        return thread.wait_for(asked, 3 * most_s + SLACK_S)

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
    ) -> Replies | None:
        """Send a command to workers; with `reply` return the replies in Celery's form."""
        if not reply:
            self._tell(make_request(command, arguments, destination, pattern, matcher))
            return None
        answers = self.ask(
            command,
            arguments,
            destination=destination,
            pattern=pattern,
            matcher=matcher,
            timeout=timeout,
            limit=limit,
        )
        return as_list(answers)

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
                self._tell(make_request("election", classic, None, None, None))
            return ElectionOutcome(id, "open")
        thread = self._open_thread()

        async def hold() -> ElectionOutcome:
            began = monotonic()
            broker, asker = await thread.opened(timeout or WAIT_S)
            left_s = max(0.0, timeout - (monotonic() - began)) if timeout > 0 else timeout
            limit = asyncio.timeout(left_s + TIDY_S if timeout > 0 else None)
            try:
                async with limit:
                    return await hold_election(broker, asker, request, left_s)
            except TimeoutError:
                if not limit.expired():  # the election's own
                    raise
                raise BrokerUnavailable(
                    f"the broker did not answer within {timeout:g} s; is it reachable?"
                ) from None

        return thread.wait_for(hold(), timeout + SLACK_S)

    def inspect(
        self,
        destination: Sequence[str] | None = None,
        timeout: float | None = None,
        pattern: str | None = None,
        matcher: str | None = None,
        limit: int | None = None,
    ) -> Inspect[dict[str, Any] | None]:
        """Questions to all workers, or to those named."""

        def ask(command: str, arguments: dict[str, Any]) -> dict[str, Any] | None:
            answers = self.ask(
                command,
                arguments,
                destination=destination,
                pattern=pattern,
                matcher=matcher,
                timeout=timeout,
                limit=limit,
            )
            return dict(answers.replies) or None

        return Inspect(ask)

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

        async def send_again(broker: Broker, _asker: ControlClient) -> str:
            return await retry_one(broker, task_id, accept=accept, reply_to=reply_to)

        return self._on_broker(send_again, timeout)

    def _on_broker(self, work: Work[T], timeout_s: float) -> T:
        thread = self._open_thread()

        async def done() -> T:
            async with asyncio.timeout(timeout_s):
                broker, asker = await thread.opened(timeout_s)
                return await work(broker, asker)

        return thread.wait_for(done(), timeout_s + SLACK_S)

    def close(self) -> None:
        """Close the connection; the next question opens another."""
        with self._making:
            thread, self._thread = self._thread, None
        if thread is not None:
            thread.close()

    def _tell(self, request: Request) -> None:
        """Send a request that gets no replies; it needs no separate connection."""
        self._clock += 1
        signer = self._the_app().signer() if is_trusted() else None
        headers, body = encode_request(request, self._clock, signer, cluster_now())
        self._the_app().producer.broadcast(
            [Broadcast(REQUEST_EXCHANGE, "", body, headers)], ttl_s=UNANSWERED_TTL_S
        )

    def _record(self, task_ids: Sequence[str], *, undo: bool = False) -> None:
        self._the_app().revoke(task_ids, expires_at=cluster_now() if undo else None)

    def _open_thread(self) -> ControlThread:
        with self._making:
            if self._thread is None or self._thread.pid != os.getpid():
                settings = self._the_app().broker_settings()
                self._thread = ControlThread(lambda: open_broker(settings))
            return self._thread

    def _the_app(self) -> ControlledApp:
        app = self._app()
        assert app is not None, "an app outlives its control"
        return app


class AsyncControl(Commands[Awaitable[Replies | None], Awaitable[dict[str, Any] | None]], AsyncQueueCommands):
    """The commands for async code. Questions run on the thread of `app.control`, not on your loop."""

    def __init__(self, control: Control) -> None:
        super().__init__(control)
        self._control = control

    async def ask(self, command: str, arguments: dict[str, Any] | None = None, **options: Any) -> Answers:
        """Ask, and return which workers answered, are silent or are unknown."""
        return await asyncio.to_thread(self._control.ask, command, arguments, **options)

    async def broadcast(
        self, command: str, arguments: dict[str, Any] | None = None, **options: Any
    ) -> Replies | None:
        """Send a command to workers; with `reply` return the replies in Celery's form."""
        return await asyncio.to_thread(self._control.broadcast, command, arguments, **options)

    def inspect(
        self,
        destination: Sequence[str] | None = None,
        timeout: float | None = None,
        pattern: str | None = None,
        matcher: str | None = None,
        limit: int | None = None,
    ) -> Inspect[Awaitable[dict[str, Any] | None]]:
        """Questions whose methods are awaited."""
        waiting = self._control.inspect(destination, timeout, pattern, matcher, limit)

        async def ask(command: str, arguments: dict[str, Any]) -> dict[str, Any] | None:
            return await asyncio.to_thread(waiting.query, command, **arguments)

        return Inspect(ask)

    async def purge(self, *queues: str, timeout: float = WAIT_S) -> int:
        """Remove all waiting messages from the queues, and return how many."""
        return await asyncio.to_thread(self._control.purge, *queues, timeout=timeout)

    async def retry(self, task_id: str, *, reply_to: str | None = None, timeout: float = WAIT_S) -> str:
        """Send a failed task again, as a new task, and return its id."""
        return await asyncio.to_thread(self._control.retry, task_id, reply_to=reply_to, timeout=timeout)

    async def election(self, id: str, topic: str, action: Any = None, **options: Any) -> ElectionOutcome:
        """Elect one worker to run the topic's handler with the action, and return the outcome."""
        return await asyncio.to_thread(self._control.election, id, topic, action, **options)

    def revoke(
        self, task_id: TaskIds, terminate: bool = False, signal: str | None = None, **options: Any
    ) -> Awaitable[Replies | None]:
        """Prevent tasks from starting, recorded first; `terminate` ends those that run."""
        return asyncio.to_thread(self._control.revoke, task_id, terminate, signal, **options)

    def unrevoke(self, task_id: TaskIds, **options: Any) -> Awaitable[Replies | None]:
        """Cancel a revoke, in the record and on the running workers."""
        return asyncio.to_thread(self._control.unrevoke, task_id, **options)


def as_list(answers: Answers) -> Replies:
    """Replies in Celery's form: one map for each node."""
    return [{node: value} for node, value in answers.replies.items()]
