"""The commands about whole queues, which the broker carries out: pause, resume, move."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

from umbel.brokers.interface import Broker, Pause
from umbel.control.client import Asker
from umbel.control.queue_pauses import PauseOutcome, move_messages, pause_queue, resume_queue

T = TypeVar("T")
ASK_S = 2.0
BROKER_S = 30.0
MOVE_S = 3600.0

Work = Callable[[Broker, Asker], Awaitable[T]]


class QueueCommands:
    def _on_broker(self, work: Work[T], timeout_s: float) -> T:
        raise NotImplementedError

    def pause_queue(self, queue: str, *, timeout: float = ASK_S) -> PauseOutcome:
        """Let no worker take messages from the queue until it is resumed, whenever the worker starts.

        Tasks that were taken before run; senders can go on sending. Celery's workers are told to stop
        consuming it, and their answers are waited for `timeout` seconds.
        """
        return self._on_broker(
            lambda broker, asker: pause_queue(broker, asker, queue, timeout_s=timeout), BROKER_S + 2 * timeout
        )

    def resume_queue(self, queue: str, *, timeout: float = ASK_S) -> PauseOutcome:
        """Let workers take messages from the queue again."""
        return self._on_broker(
            lambda broker, asker: resume_queue(broker, asker, queue, timeout_s=timeout), BROKER_S + timeout
        )

    def paused_queues(self) -> Mapping[str, Pause]:
        """The queues that are paused, since when, and which nodes were told."""
        return self._on_broker(lambda broker, _: broker.paused(), BROKER_S)

    def move_messages(
        self, source: str, target: str, *, limit: int | None = None, timeout: float = MOVE_S
    ) -> int:
        """Move the messages that wait in one queue, due or not, to another, and return how many were."""
        return self._on_broker(lambda broker, _: move_messages(broker, source, target, limit=limit), timeout)


class AsyncQueueCommands:
    """The same, awaited."""

    def __init__(self, commands: QueueCommands) -> None:
        self._commands = commands

    async def pause_queue(self, queue: str, *, timeout: float = ASK_S) -> PauseOutcome:
        return await asyncio.to_thread(self._commands.pause_queue, queue, timeout=timeout)

    async def resume_queue(self, queue: str, *, timeout: float = ASK_S) -> PauseOutcome:
        return await asyncio.to_thread(self._commands.resume_queue, queue, timeout=timeout)

    async def paused_queues(self) -> Mapping[str, Pause]:
        return await asyncio.to_thread(self._commands.paused_queues)

    async def move_messages(
        self, source: str, target: str, *, limit: int | None = None, timeout: float = MOVE_S
    ) -> int:
        move = self._commands.move_messages
        return await asyncio.to_thread(move, source, target, limit=limit, timeout=timeout)
