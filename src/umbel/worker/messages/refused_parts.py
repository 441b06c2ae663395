"""RefusedParts: results and follow-ups that the broker or the store does not take.

The message that brought them has ended. To those who wait for what they stand for, that has failed.
"""

import logging
from collections.abc import Sequence
from time import time

from msgspec.structs import replace

from umbel.brokers.interface import Refused
from umbel.errors import BrokerRefused, WireError
from umbel.protocol.delivery.states import FAILURE
from umbel.wire.compat.legacy import to_v2
from umbel.wire.message import Outgoing, StoredResult
from umbel.wire.result import encode_failure, exception_map
from umbel.wire.task import read_headers
from umbel.worker.context import Counters
from umbel.worker.messages.remains import Remains
from umbel.worker.messages.settling import Settler
from umbel.worker.messages.task_events import TaskEvents

log = logging.getLogger("umbel.worker.tasks")


class RefusedParts:
    def __init__(self, counters: Counters, remains: Remains, settler: Settler, events: TaskEvents) -> None:
        self._counters = counters
        self._remains = remains
        self._settler = settler
        self._events = events

    def end(self, refused: Sequence[Refused]) -> None:
        for one in refused:
            self._counters.refused += 1
            if isinstance(one.part, StoredResult):
                self._end_result(one.part, one.reason)
            else:
                self._end_message(one.part, one.reason)

    def _end_result(self, result: StoredResult, reason: str) -> None:
        fields = {"task_id": result.task_id, "state": result.status, "why": reason}
        if result.status == FAILURE:
            log.error("cannot store the failure of a task; callers that wait get no answer", extra=fields)
        else:  # a short one may be accepted, and ends the wait for the result
            log.error("cannot store the result of a task; storing a failure instead", extra=fields)
            error = BrokerRefused(
                f"the task ended as {result.status}, but its result cannot be stored: {reason}"
            )
            told = encode_failure(result.task_id, exception_map(error), None, done_at=time())
            self._settler.report([replace(told, reply_to=result.reply_to)], ())

    def _end_message(self, sent: Outgoing, reason: str) -> None:
        """It is among the dead letters. To those who wait for its task it has failed."""
        error = BrokerRefused(f"the queue {sent.queue!r} refused the message: {reason}")
        task_id = sent.message.correlation_id
        fields = {"queue": sent.queue, "task_id": task_id, "why": reason}
        log.error("broker refused a message; moved to dead letters", extra=fields)
        try:
            message = to_v2(sent.message)
            headers = read_headers(message)
        except WireError:
            return
        self._events.refused(headers, error)
        ending = self._remains.of(message, sent.queue, error, FAILURE)
        self._settler.report(ending.results, ending.follow_ups, ending.after)
