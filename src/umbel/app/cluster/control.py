"""app.control: query workers and send them commands, from blocking and from async code.

    app.control.ping()                                   [{"w1@host": {"ok": "pong"}}]
    app.control.inspect().active()                       {"w1@host": [...]}
    app.control.revoke(task_id, terminate=True)
    app.control.pause_queue("emails")
    await app.control.aio.ping()                         the same, awaited
    app.control.ask("stats", timeout=2).silent           who should have answered and did not

A question has one deadline, `timeout`, which covers connecting, sending and waiting; it is over earlier
when every node has answered that was named or is known to be a member. Questions go out on a
separate connection, kept by one thread for the whole app and opened when first needed.
"""

import asyncio
import os
import threading
from collections.abc import Awaitable, Collection, Iterable, Sequence
from time import monotonic
from typing import Any, Protocol, TypeVar
from weakref import ref

from umbel.app.cluster.commands import DEFAULT_TIMEOUT_S, WAIT_S, Commands, Inspect, TaskIds
from umbel.app.cluster.control_thread import ControlThread
from umbel.app.cluster.elections import ElectionOutcome, hold_election, make_election, refuse_unknown
from umbel.app.cluster.queue_commands import AsyncQueueCommands, QueueCommands, Work
from umbel.app.cluster.topics import Topics
from umbel.app.configuration.settings import Settings
from umbel.brokers.interface import Broadcast, Broker, BrokerSettings, Producer
from umbel.brokers.registry import open_broker
from umbel.clock import cluster_now
from umbel.control.client import UNANSWERED_TTL_S, Asker, make_request
from umbel.control.state import REVOKE_RETENTION_S
from umbel.coordination.failures import retry_one
from umbel.errors import BrokerUnavailable
from umbel.protocol.pidbox import Answers, Request
from umbel.wire.control import REQUEST_EXCHANGE, encode_request
from umbel.wire.values import decode_json

CLASSIC_ANSWER_S = 1.0
TIDY_S = 0.05  # the part that watches the time ends by itself
SLACK_S = 30.0  # the thread answers long before; a caller must not hang although it did not

T = TypeVar("T")
Replies = list[dict[str, Any]]


class ControlledApp(Protocol):
    """What remote control needs of the app."""

    @property
    def settings(self) -> Settings: ...
    def broker_settings(self) -> BrokerSettings: ...
    @property
    def producer(self) -> Producer: ...
    @property
    def topics(self) -> Topics: ...
    def task_queues(self) -> Collection[str]: ...
    def revoke(self, task_ids: Iterable[str], *, expires_at: float) -> None: ...


class Control(Commands[Replies | None, dict[str, Any] | None], QueueCommands):
    """The commands for blocking code; `aio` has them for async code."""

    def __init__(self, app: ControlledApp) -> None:
        self._app = ref(app)  # the app holds us
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
        timeout: float = DEFAULT_TIMEOUT_S,
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
        )
        return thread.wait_for(asked, timeout + SLACK_S)

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
    ) -> Replies | None:
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
            if timeout > 0:  # the outcome is unknown, but workers that cannot take part say so
                refuse_unknown(topic, self.ask("election", classic, timeout=min(timeout, CLASSIC_ANSWER_S)))
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
        timeout: float = DEFAULT_TIMEOUT_S,
        pattern: str | None = None,
        matcher: str | None = None,
        limit: int | None = None,
    ) -> Inspect[dict[str, Any] | None]:
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

        async def empty(broker: Broker, _: Asker) -> int:
            return sum([await broker.purge(queue) for queue in sorted(named)])

        return self._on_broker(empty, timeout)

    discard_all = purge

    def retry(self, task_id: str, *, reply_to: str | None = None, timeout: float = WAIT_S) -> str:
        """Send a failed task again, as a new task, and return its id; NotKept if its message is not there.

        `reply_to`: where the result goes, if it is sent to who asks for it.
        """
        accept = self._the_app().settings.accept_content

        async def send_again(broker: Broker, _asker: Asker) -> str:
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
        """Send a request that gets no answers; it needs no separate connection."""
        self._clock += 1
        headers, body = encode_request(request, self._clock, self._the_app().settings.keyring, cluster_now())
        self._the_app().producer.broadcast(
            [Broadcast(REQUEST_EXCHANGE, "", body, headers)], ttl_s=UNANSWERED_TTL_S
        )

    def _record(self, task_ids: Sequence[str], *, retention_s: float = REVOKE_RETENTION_S) -> None:
        self._the_app().revoke(task_ids, expires_at=cluster_now() + retention_s)

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
        return await asyncio.to_thread(self._control.ask, command, arguments, **options)

    async def broadcast(
        self, command: str, arguments: dict[str, Any] | None = None, **options: Any
    ) -> Replies | None:
        return await asyncio.to_thread(self._control.broadcast, command, arguments, **options)

    def inspect(
        self,
        destination: Sequence[str] | None = None,
        timeout: float = DEFAULT_TIMEOUT_S,
        pattern: str | None = None,
        matcher: str | None = None,
        limit: int | None = None,
    ) -> Inspect[Awaitable[dict[str, Any] | None]]:
        waiting = self._control.inspect(destination, timeout, pattern, matcher, limit)

        async def ask(command: str, arguments: dict[str, Any]) -> dict[str, Any] | None:
            return await asyncio.to_thread(waiting.query, command, **arguments)

        return Inspect(ask)

    async def purge(self, *queues: str, timeout: float = WAIT_S) -> int:
        return await asyncio.to_thread(self._control.purge, *queues, timeout=timeout)

    async def retry(self, task_id: str, *, reply_to: str | None = None, timeout: float = WAIT_S) -> str:
        return await asyncio.to_thread(self._control.retry, task_id, reply_to=reply_to, timeout=timeout)

    async def election(self, id: str, topic: str, action: Any = None, **options: Any) -> ElectionOutcome:
        return await asyncio.to_thread(self._control.election, id, topic, action, **options)

    def revoke(
        self, task_id: TaskIds, terminate: bool = False, signal: str | None = None, **options: Any
    ) -> Awaitable[Replies | None]:
        return asyncio.to_thread(self._control.revoke, task_id, terminate, signal, **options)

    def unrevoke(self, task_id: TaskIds, **options: Any) -> Awaitable[Replies | None]:
        return asyncio.to_thread(self._control.unrevoke, task_id, **options)


def as_list(answers: Answers) -> Replies:
    """Replies in Celery's form: one map for each node."""
    return [{node: value} for node, value in answers.replies.items()]
