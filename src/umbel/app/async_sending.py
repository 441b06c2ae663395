"""AsyncSending: the part of App for async code. Each method is the blocking one with an `a` before its name.

What a message contains, where it goes and whether it is unique is decided by the code that blocking senders
use (`prepare`, `sending/`). This module only awaits it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from time import monotonic, time
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack

from umbel.app.options import SendOptions
from umbel.app.request import CURRENT_REQUEST
from umbel.app.sending.preparation import Prepared, is_unique, read_cluster_id
from umbel.app.sending.publication import UniqueCall, arranged_later, unique_call
from umbel.backends.interface import Backend
from umbel.backends.registry import sends_results
from umbel.errors import BrokerError, SendUnknown
from umbel.outbox.current import OPEN, open_block

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager

    from umbel.app.canvas.signature import Signature
    from umbel.app.event_feed import EventSubscription
    from umbel.app.interfaces import AppBase
    from umbel.app.results import AsyncResult
    from umbel.app.sending.loop_client import Clients
else:
    AppBase = object

T = TypeVar("T")


class AsyncSending(AppBase):
    """The awaited half of App: sends and reads results without blocking the event loop."""

    @cached_property
    def clients(self) -> "Clients":
        """The connections that are open for each event loop."""
        from umbel.app.sending.loop_client import Clients  # with asyncio, which few apps and no child need

        return Clients(self)

    # -- sending ---------------------------------------------------------------------------------

    async def asend_task(
        self,
        name: str,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        **options: Unpack[SendOptions],
    ) -> "AsyncResult[Any]":
        """Send a task by its name, without blocking the event loop."""
        return await self.asend(name, args, kwargs or {}, options)

    async def asend(
        self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], options: SendOptions
    ) -> "AsyncResult[Any]":
        """Send a call by the task's name, without blocking the event loop."""
        known = self.tasks.get(name)
        if is_unique(known.options if known else None, options):
            return await self.asend_unique(name, args, kwargs, options)
        sender, ends = CURRENT_REQUEST.get(), self.send_ends()
        prepared = await self.aprepare(lambda: self.prepare(name, args, kwargs, options, sender=sender), ends)
        await self.apublish([prepared], ends)
        return self.result_of(prepared)

    async def asend_many(self, signatures: "Iterable[Signature[Any]]") -> "list[AsyncResult[Any]]":
        """Send many calls in one step of the broker, all of them or none, without blocking the event loop."""
        from umbel.app.canvas.signature import prepare_many

        ends = self.send_ends()
        prepared, results = await self.aprepare(lambda: prepare_many(signatures), ends)
        await self.apublish(prepared, ends)
        return results

    async def asend_unique(
        self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], options: SendOptions
    ) -> "AsyncResult[Any]":
        """Send the call, unless its key is held; return the result of the task that holds the key."""
        ends = self.send_ends()
        call = await self.aprepare(lambda: unique_call(self, name, args, kwargs, options), ends)
        in_place = self.eager_backend
        holder = await self._hold(call, ends) if in_place is None else in_place.unique_holder(call.key)
        if holder not in (None, call.prepared.task_id):
            return call.result_of(holder)
        try:
            await self.apublish([call.prepared], ends)
        except SendUnknown:
            raise  # it may have arrived: the key stays held, and the same id may be sent again
        except BrokerError:
            with suppress(BrokerError):  # then the key expires
                async with self.clients.here().producer() as producer:
                    await producer.release_unique([(call.key, call.result.id)])
            raise
        return call.result

    def send_ends(self) -> float:
        """The deadline of a send that begins now, on the monotonic clock: all its steps share it."""
        settings = self.settings
        return monotonic() + (settings.publish_timeout_s or settings.connect_timeout_s)

    async def aprepare(self, make: Callable[[], T], ends: float) -> T:
        """Build the messages; work that the result backend must do first runs in a thread."""
        if self.eager_backend is not None:
            return make()
        await self.clients.here().turns.take()
        settings = self.settings
        if self.signing_cluster.is_missing(settings) and open_block(self) is None:
            await self._learn_cluster(ends)
        if sends_results(settings.backend) and not settings.task_ignore_result:
            await self._beside(lambda backend: backend.reply_to, "cannot get the address for results", ends)
        with arranged_later() as steps:
            made = make()
        if steps:
            await self._beside(
                lambda backend: [step(backend) for step in steps], "cannot write to the result backend", ends
            )
        return made

    async def apublish(self, prepared: Sequence[Prepared], ends: float) -> None:
        """Publish prepared messages before the deadline, or raise.

        `SendUnknown` says that the outcome is unknown. The same ids can be sent again; except on RabbitMQ
        they run once.
        """
        outgoing, began = self.begin_publishing(prepared), time()
        runner = self.eager_runner
        if runner is not None:
            from asyncio import to_thread

            await to_thread(runner.run, outgoing)
        elif OPEN.get() is not None and (block := open_block(self)) is not None:
            self.check_queues(outgoing)
            await block.awrite(outgoing)
        else:
            from umbel.app.sending.loop_client import publish

            request = CURRENT_REQUEST.get()
            client, settings = self.clients.here(), self.settings
            if await publish(client, outgoing, settings, request, ends) and settings.task_send_sent_event:
                client.sent.add(outgoing, began)
        self.end_publishing(prepared)

    # -- results ---------------------------------------------------------------------------------

    async def abackend(self) -> Backend:
        """The result backend, ready to be awaited on this loop."""
        return self.eager_backend or await self.clients.here().backend()

    async def abeside(self, work: Callable[[], T]) -> T:
        """Run blocking work in a thread; a few at once at most."""
        return await self.clients.here().in_thread(work)

    def alisten(self, task_id: str) -> "AbstractAsyncContextManager[EventSubscription]":
        """The events of a task, from now on."""
        return self.clients.here().events.listen(task_id)

    # -- the context -----------------------------------------------------------------------------

    async def aclose(self) -> None:
        """Close what is open for this event loop; with the last loop, the blocking client's connections too.

        Those are shared: the result backend is one object for all loops.
        """
        await self.clients.close_here()
        if self.clients.are_open:
            return
        from asyncio import to_thread

        await to_thread(self.close)

    async def __aenter__(self) -> Self:
        """Load the modules that sending needs, so that the first send is fast; connections open later."""
        if self.eager_backend is None:
            await self.clients.here().load()
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.aclose()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    # -- steps of a send --------------------------------------------------------------------------

    async def _hold(self, call: UniqueCall, ends: float) -> str:
        from umbel.app.sending.loop_client import patiently

        async with self.clients.here().producer() as producer:
            call.check(producer.capabilities)
            return await patiently(
                lambda: producer.hold_unique(call.key, call.prepared.task_id, ttl_s=call.ttl_s),
                ends,
                "cannot take the key of a unique task",
            )

    async def _learn_cluster(self, ends: float) -> None:
        """Ask the broker in a thread, once, for the id that signatures are bound to."""
        from umbel.app.sending.loop_client import patiently

        client, settings = self.clients.here(), self.broker_settings()
        found = await patiently(
            lambda: client.in_thread(lambda: read_cluster_id(settings)), ends, "cannot read the cluster's id"
        )
        if found is not None:  # otherwise signing raises, with what to do
            self.signing_cluster.learn(found.id)

    async def _beside(self, work: Callable[[Backend], object], what: str, ends: float) -> None:
        from umbel.app.sending.loop_client import patiently

        client = self.clients.here()
        backend = await client.backend()
        await patiently(lambda: client.in_thread(work, backend), ends, what)
