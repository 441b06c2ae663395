"""Rows: a prepared message as the outbox keeps it, in one form for all brokers.

The relay only publishes: queue or exchange, headers, properties, body and the task's id are fixed when the
row is written. A row that cannot be read, whoever wrote it, is a `BadMessage` that says why.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgspec

from umbel.errors import BadMessage, UmbelError, WireError
from umbel.wire.message import Message, Outgoing
from umbel.wire.task import read_headers
from umbel.wire.values import decode_json_as

PROBLEM_MAX_CHARS = 500


class StoredRow(NamedTuple):
    """A committed row: `row_id` is its place in the table and never used again."""

    row_id: int
    message: bytes


class Problem(NamedTuple):
    """Why a row was set aside."""

    row_id: int
    why: str


class Readable(NamedTuple):
    row_id: int
    outgoing: Outgoing


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Outgoing).decode
_MAP = msgspec.json.Decoder(dict[str, Any])


def encode_rows(batch: Iterable[Outgoing]) -> list[tuple[str, bytes]]:
    """(task id, message) of each row, in the order of sending."""
    return [(one.message.correlation_id, _encode(one)) for one in batch]


def decode_row(data: bytes) -> Outgoing:
    try:
        outgoing = _decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadMessage(f"not a valid outbox row: {error}") from None
    _check_maps(outgoing.message)
    if not outgoing.message.correlation_id:
        raise BadMessage("the message in the outbox row has no task id")
    if not (outgoing.queue or outgoing.exchange):
        raise BadMessage("the message in the outbox row names neither a queue nor an exchange")
    return outgoing


def _check_maps(message: Message) -> None:
    """Headers and properties as every broker can hold them; what is nested too deep, some cannot."""
    read_headers(message)
    decode_json_as(_MAP, message.headers, what="the map of headers")
    if message.properties:
        decode_json_as(_MAP, message.properties, what="the map of properties")


def read_rows(rows: Sequence[StoredRow]) -> tuple[list[Readable], list[Problem]]:
    """Those that can be published, in order, and those that nobody can."""
    readable: list[Readable] = []
    problems: list[Problem] = []
    for row in rows:
        try:
            readable.append(Readable(row.row_id, decode_row(row.message)))
        except WireError as error:
            problems.append(problem(row.row_id, error))
    return readable, problems


def problem(row_id: int, error: BaseException) -> Problem:
    kind = type(error).__name__
    told = str(error) if isinstance(error, UmbelError) else f"{kind}: {error}"
    # PostgreSQL's text holds no NUL.
    return Problem(row_id, told.replace("\0", "")[:PROBLEM_MAX_CHARS] or kind)
