"""Messages that wait and dead letters, as rows that people read; commands and pages share them."""

from datetime import UTC, datetime

from umbel.brokers.interface import DeadLetter, Delivery
from umbel.errors import WireError
from umbel.monitor.hiding import Hides, hides_nothing, is_open
from umbel.monitor.shapes import DeadLetterRow, WaitingMessage
from umbel.protocol.delivery.sensitive import MASK
from umbel.wire.compat.legacy import to_v2
from umbel.wire.message import Message
from umbel.wire.task import TaskHeaders, read_headers


def letter_row(letter: DeadLetter) -> DeadLetterRow:
    headers = _headers(letter.message)
    return DeadLetterRow(
        id=letter.letter_id,
        buried=datetime.fromtimestamp(letter.buried_at, UTC).isoformat(timespec="seconds"),
        queue=letter.queue,
        task="?" if headers is None else str(headers.task),
        task_id=letter.message.correlation_id if headers is None else str(headers.id),
        starts=letter.starts,
        reason=letter.reason,
    )


def waiting_row(delivery: Delivery, hides: Hides = hides_nothing) -> WaitingMessage:
    try:
        headers = read_headers(to_v2(delivery.message))
    except WireError as error:
        return WaitingMessage(
            task_id="?",
            task=f"unreadable: {error}",
            args="",
            kwargs="",
            retries=0,
            priority=delivery.message.priority,
            starts=delivery.starts,
        )
    is_hidden = hides(headers.task) and is_open(headers.argsrepr, headers.kwargsrepr)
    return WaitingMessage(
        task_id=headers.id,
        task=headers.task,
        args=MASK if is_hidden else headers.argsrepr,
        kwargs=MASK if is_hidden else headers.kwargsrepr,
        retries=headers.retries,
        priority=delivery.message.priority,
        starts=delivery.starts,
    )


def _headers(message: Message) -> TaskHeaders | None:
    try:
        return read_headers(to_v2(message))
    except WireError:
        return None
