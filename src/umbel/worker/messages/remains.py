"""Remains: what a message leaves behind whose task does not run to its end, as its app says."""

from collections.abc import Sequence

from msgspec.structs import replace

from umbel.backends.registry import sends_results
from umbel.brokers.interface import Tag
from umbel.wire.message import Message, StoredResult
from umbel.worker.context import WorkerContext
from umbel.worker.messages.settling import Settler
from umbel.worker.settings import Ending


class Remains:
    def __init__(self, context: WorkerContext, settler: Settler) -> None:
        self._end_without_running = context.settings.end_without_running
        self.sends_results = sends_results(context.backend.url)
        self._settler = settler

    def of(
        self, message: Message, queue: str, error: Exception, status: str, tag: Tag | None = None
    ) -> Ending:
        """What is to be stored and sent; what must come before is on its way.

        `tag`: of the verdict that ends the message, which the caller adds next, if there is one.
        """
        ending = self._end_without_running(message, queue, error, status)
        if (before := ending.before) is not None:
            self._settler.do_first(
                lambda: self._addressed(message, before()),
                attempts_max=ending.attempts_max,
                joins=tag if ending.joins else None,
            )
        return self._addressed(message, ending)

    def _addressed(self, message: Message, ending: Ending) -> Ending:
        return Ending(self.addressed(message, ending.results), ending.follow_ups, after=ending.after)

    def addressed(self, message: Message, results: Sequence[StoredResult]) -> Sequence[StoredResult]:
        """Where results are sent (rpc), they go to who asked for them; if nobody did, nowhere."""
        if not self.sends_results:
            return results
        reply_to = message.reply_to
        return [replace(result, reply_to=reply_to) for result in results] if reply_to else ()
