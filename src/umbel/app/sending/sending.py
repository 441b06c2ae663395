"""Sending: the App's client for code that may block. `aio/sending.py` is the one for async code.

A call becomes a message (`prepare.py`), and the producer of the broker puts that into its queue; in eager
mode the task runs at once instead, and in an outbox block the message is written for a relay (`outbox/`).
While the broker is unavailable a sender waits (`patience.py`).

A running task gets no error: its unsent messages are buffered and go out when the task
ends, with its result and its ack, as one step where the broker can. If its process dies before
that, what was kept goes with it, and the task, which was not acknowledged, runs again. What one
task buffers is limited by `publish_buffer_max`; past it the task gets an error.

An awaited send whose outcome is unknown is an error in a task too (`SendUnknown`): what goes out with the
task's end bears no mark of the first attempt, and could run twice. Only the task can send it under its mark.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from os import getpid
from sys import modules
from threading import Lock
from time import monotonic, time
from typing import TYPE_CHECKING, Any, Unpack

from umbel.app.aio.loop_warning import warn_on_loop
from umbel.app.configuration.settings import Settings
from umbel.app.results import AsyncResult
from umbel.app.running.eager import EagerBackend, EagerMode, EagerRunner
from umbel.app.running.request import CURRENT_REQUEST, Request
from umbel.app.sending.announcing import announce
from umbel.app.sending.batches import prepare_many
from umbel.app.sending.defaults import SendDefaults
from umbel.app.sending.options import SendOptions
from umbel.app.sending.patience import LONGEST_PAUSE_S, Patience, retried
from umbel.app.sending.prepare import Prepared, is_unique, origin, prepare
from umbel.app.sending.routing import Router
from umbel.app.sending.sent_events import SentEvents
from umbel.app.sending.uniqueness import send_unique
from umbel.app.signals import Signals
from umbel.brokers.interface import BrokerSettings, Producer
from umbel.brokers.registry import open_producer
from umbel.errors import AccessRefused, BrokerUnavailable, BufferFull, SendUnknown
from umbel.outbox.current import OPEN, open_block
from umbel.wire.message import Outgoing

if TYPE_CHECKING:
    from umbel.app.canvas.signature import Signature
    from umbel.app.interfaces import SendingApp
else:
    SendingApp = object

log = logging.getLogger("umbel.publishing")
_AWAITED = "await task.adelay(...), or aapply_async, asend_task, asend_many"


class Sending(SendingApp):
    router: Router
    signals: Signals
    send_defaults: dict[str, SendDefaults]
    eager_mode: EagerMode
    _opening: Lock
    _producer: Producer | None
    _sent_events: SentEvents | None

    def send_task(
        self,
        name: str,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        **options: Unpack[SendOptions],
    ) -> AsyncResult[Any]:
        """Send a task by its name, which need not be known in this process."""
        return self.send(name, args, kwargs or {}, options)

    def send(
        self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], options: SendOptions
    ) -> AsyncResult[Any]:
        known = self.tasks.get(name)
        if is_unique(known.options if known else None, options):
            return send_unique(self, name, args, kwargs, options)
        prepared = self.prepare(name, args, kwargs, options, sender=CURRENT_REQUEST.get())
        self.publish([prepared])
        return self.result_of(prepared)

    def result_of(self, prepared: Prepared) -> AsyncResult[Any]:
        return AsyncResult(prepared.task_id, app=self, ignored=prepared.ignores_result, types=prepared.types)

    def ignores_result(self, name: str, options: SendOptions) -> bool:
        """Whether no worker will store the result of this call."""
        known = self.tasks.get(name)
        stated = (options.get("ignore_result"), known.options.ignore_result if known else None)
        return next((said for said in stated if said is not None), self.settings.task_ignore_result)

    def send_many(self, signatures: Iterable["Signature[Any]"]) -> list[AsyncResult[Any]]:
        """Send many calls in one step of the broker: all of them or none."""
        prepared, results = prepare_many(signatures)
        self.publish(prepared)
        return results

    def prepare(
        self,
        name: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        options: SendOptions,
        *,
        sender: Request | None = None,
        task_id: str = "",
    ) -> Prepared:
        known = self.tasks.get(name)
        defaults = known.options if known else None
        if self.signals.before_task_publish.receivers:
            options, task_id = announce(self, name, args, kwargs, options, defaults=defaults, task_id=task_id)
        return prepare(self, name, args, kwargs, options, defaults=defaults, sender=sender, task_id=task_id)

    def publish(self, prepared: Sequence[Prepared]) -> None:
        outgoing, began = self.begin_publishing(prepared), time()
        if (runner := self.eager_runner) is not None:
            runner.run(outgoing)
        elif OPEN.get() is not None and (block := open_block(self)) is not None:
            block.write(outgoing)
        else:
            asyncio = modules.get("asyncio")
            if asyncio is not None and asyncio._get_running_loop() is not None:  # in few threads one runs
                warn_on_loop("sending a task", _AWAITED)
            if publish(self.producer, outgoing, self.settings, CURRENT_REQUEST.get()):
                self.tell_sent([(outgoing, began)])
        self.end_publishing(prepared)

    def begin_publishing(self, prepared: Sequence[Prepared]) -> list[Outgoing]:
        request = CURRENT_REQUEST.get()
        if request is not None:
            request.sent(one.task_id for one in prepared)
        return [one.outgoing for one in prepared]

    def end_publishing(self, prepared: Sequence[Prepared]) -> None:
        if self.signals.after_task_publish.receivers:
            for one in prepared:
                self.signals.after_task_publish.send(
                    task=one.task, task_id=one.task_id, queue=one.outgoing.queue
                )

    def tell_sent(self, sent: Sequence[tuple[Sequence[Outgoing], float]]) -> None:
        """Batches, each with the time from which on it was sent; no worker could take it before."""
        if not self.settings.task_send_sent_event:
            return
        with self._opening:
            if self._sent_events is None or self._sent_events.pid != getpid():
                self._sent_events = SentEvents(origin())
            teller = self._sent_events
        teller.tell(self.producer, sent)

    # -- where it goes ---------------------------------------------------------------------------

    def broker_settings(self) -> BrokerSettings:
        """How every client of this app opens its broker."""
        return self.settings.for_broker()

    @property
    def producer(self) -> Producer:
        opened = self._producer  # mostly it is open, and no lock is needed to see that
        if opened is not None:
            return opened
        with self._opening:
            if self._producer is None:
                self._producer = open_producer(self.broker_settings())
            return self._producer

    @property
    def eager_runner(self) -> EagerRunner | None:
        """Runs what is sent here; None where that goes to the broker."""
        mode = self.eager_mode
        return mode.runner if mode.was_entered or self.settings.task_always_eager else None

    @property
    def eager_backend(self) -> EagerBackend | None:
        runner = self.eager_runner
        return None if runner is None else runner.backend


def publish(
    producer: Producer, batch: Sequence[Outgoing], settings: Settings, request: Request | None
) -> bool:
    """Whether it was sent; False: it is kept until the running task ends."""
    # Outside of tasks nothing waits to go first, and most sends succeed at once.
    publication = None if request is None else Publication(batch, settings, request)
    if publication is not None and publication.must_wait():
        return False
    began = monotonic()
    try:
        producer.publish(batch if publication is None else publication.messages)
    except BrokerUnavailable as error:
        failed = error
    else:
        return publication is None or publication.succeeded()
    publication = publication or Publication(batch, settings, request)
    try:
        patience = Patience(publication.timeout_s, began=began)
        retried(lambda: producer.publish(publication.messages), failed, patience)
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
