"""Claimed: one message that this worker has claimed and not yet settled."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from umbel.brokers.interface import Delivery
from umbel.errors import WireError
from umbel.protocol.delivery.delivery import Arrival, Run
from umbel.protocol.delivery.sensitive import HIDDEN, MASK, Sensitive
from umbel.wire.message import Message
from umbel.wire.task import TaskHeaders, decode_task, show_args, show_kwargs
from umbel.worker.messages.kept_outcomes import is_same_message

DECODED_MAX_BYTES = 64 * 1024


class Claimed(msgspec.Struct):
    number: int
    delivery: Delivery
    message: Message  # as protocol version 2
    headers: TaskHeaders
    arrival: Arrival
    run: Run | None = None  # once it is admitted
    hard_limit_s: float | None = None
    soft_limit_s: float | None = None
    start_by: float = 0.0  # on the monotonic clock: its limit permits no later start; 0: whenever
    acked: bool = False  # the broker has forgotten it, or was told to, while its task has not ended
    told_started: bool = False
    received_at: float = 0.0  # Unix time, where it is measured
    started_at: float | None = None  # Unix time, once it is known to run
    pid: int | None = None
    hides: Sensitive | None = None
    terminated_by: str = ""  # the signal, when somebody asked to end it

    @property
    def shown(self) -> tuple[str, str]:
        """Arguments and keywords as events may show them.

        What the sender wrote into the headers is not believed where something is sensitive: Celery's
        clients know nothing of that.
        """
        headers = self.headers
        if self.hides is None:
            return headers.argsrepr, headers.kwargsrepr
        found = self.arguments()
        if found is None:
            return MASK, MASK
        return show_args(found[0]), show_kwargs(found[1])

    def arguments(self, mask: Any = HIDDEN) -> tuple[Sequence[Any], Mapping[str, Any]] | None:
        """Without the sensitive ones; None when they cannot be read here, or are large.

        Only JSON is: the main process runs nothing that a message brings.
        """
        if not self.message.body or len(self.message.body) > DECODED_MAX_BYTES:
            return None
        try:
            call = decode_task(self.message)
        except WireError:
            return None
        return (
            (call.args, call.kwargs) if self.hides is None else self.hides.hide(call.args, call.kwargs, mask)
        )

    def is_of(self, delivery: Delivery) -> bool:
        """Whether the delivery brings this very message."""
        return is_same_message(self.delivery, delivery)
