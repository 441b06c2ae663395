"""Publishing while the broker is unavailable: who waits, who gets an error, what is buffered.

A sender waits up to `publish_timeout_s`, retries with growing pauses, and then gets an error. An
attempt whose outcome is unknown, because the link broke before the answer, is made again: a
message may be there twice, never not at all.

A running task gets no error: its unsent messages are buffered and go out when the task
ends, with its result and its ack, as one step where the broker can. If its process dies before
that, what was kept goes with it, and the task, which was not acknowledged, runs again. What one
task buffers is limited by `publish_buffer_max`; past it the task gets an error.

An awaited send whose outcome is unknown is an error in a task too (`SendUnknown`): what goes out with the
task's end bears no mark of the first attempt, and could run twice. Only the task can send it under its mark.
"""

import logging
from collections.abc import Callable, Sequence
from random import random
from time import monotonic, sleep
from typing import TypeVar

from umbel.app.configuration.settings import Settings
from umbel.app.running.request import Request
from umbel.brokers.interface import Producer
from umbel.errors import AccessRefused, BrokerUnavailable, BufferFull, SendUnknown
from umbel.protocol.retry import reconnect_wait_s
from umbel.wire.message import Outgoing

T = TypeVar("T")
log = logging.getLogger("umbel.publishing")
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.02, 1.0


class Patience:
    """How long to go on after failures of the broker, shared by those who block and those who await.

    The first failure is logged, if `may_tell` does not say that others have told of it just now.
    """

    def __init__(self, timeout_s: float, may_tell: Callable[[], bool] = lambda: True) -> None:
        self._ends = monotonic() + timeout_s
        self._failures = 0
        self._may_tell = may_tell

    def pause_s(self, error: BrokerUnavailable) -> float:
        """How long to wait before the next attempt; raises the error if there is no use or no time."""
        if isinstance(error, AccessRefused):
            raise error
        self._failures += 1
        pause_s = reconnect_wait_s(self._failures, random(), first_s=FIRST_PAUSE_S, most_s=LONGEST_PAUSE_S)
        left_s = self._ends - monotonic()
        if pause_s >= left_s:
            raise error
        if self._failures == 1 and self._may_tell():
            fields = {"up_to_s": round(left_s, 1), "why": str(error)}
            log.warning("broker unavailable; waiting to publish", extra=fields)
        return pause_s


def patiently(work: Callable[[], T], timeout_s: float) -> T:
    """Retry while the broker is unavailable and time is left; an attempt itself may take longer."""
    patience = Patience(timeout_s)
    while True:
        try:
            return work()
        except BrokerUnavailable as error:
            pause_s = patience.pause_s(error)
        sleep(pause_s)


def publish(
    producer: Producer, batch: Sequence[Outgoing], settings: Settings, request: Request | None
) -> bool:
    """Whether it was sent; False: it is kept until the running task ends."""
    publication = Publication(batch, settings, request)
    if publication.must_wait():
        return False
    try:
        patiently(lambda: producer.publish(publication.messages), publication.timeout_s)
    except BrokerUnavailable as error:
        return publication.failed(error)
    return publication.succeeded()


class Publication:
    """What `publish` does, apart from how it waits: what is sent within which time, and what comes of it.

    Each step says whether the batch was sent.
    """

    def __init__(self, batch: Sequence[Outgoing], settings: Settings, request: Request | None) -> None:
        self._batch = batch
        self._limit = settings.publish_buffer_max
        self._task = None if request is None or request.called_directly else request
        # What waits goes first. Who has waited once does not wait again with every message.
        self._waiting = () if self._task is None else tuple(self._task.unsent)
        self.messages: Sequence[Outgoing] = [*self._waiting, *batch] if self._waiting else batch
        self.timeout_s = 0.0 if self._waiting else settings.publish_timeout_s

    def must_wait(self) -> bool:
        """The broker was away a moment ago: what the task sends is kept."""
        if self._task is None or monotonic() >= self._task.try_again_at:
            return False
        _keep(self._task, self._batch, self._limit, None)
        return True

    def succeeded(self) -> bool:
        if self._task is not None and self._waiting:
            sent = set(
                map(id, self._waiting)
            )  # other coroutines of the task may have added some, or sent these
            self._task.unsent[:] = [one for one in self._task.unsent if id(one) not in sent]
        return True

    def failed(self, error: BrokerUnavailable) -> bool:
        if self._task is None or isinstance(error, AccessRefused):
            raise error
        if isinstance(error, SendUnknown):  # what waited was promised, and goes out with the task's end
            raise SendUnknown([one.message.correlation_id for one in self._batch], error.why) from error
        _keep(self._task, self._batch, self._limit, error)
        return False


def _keep(request: Request, batch: Sequence[Outgoing], limit: int, error: BrokerUnavailable | None) -> None:
    request.try_again_at = monotonic() + LONGEST_PAUSE_S
    if len(request.unsent) + len(batch) > limit:
        raise BufferFull(
            f"broker unavailable; {request.task}[{request.id}] buffers {len(request.unsent)} messages, and "
            f"{len(batch)} more would exceed the limit of {limit} ('publish_buffer_max')"
        ) from error
    if not request.unsent:
        why = {"task": request.task, "task_id": request.id, "why": str(error)}
        log.warning("broker unavailable; messages sent by the task are kept until it ends", extra=why)
    request.unsent.extend(batch)
