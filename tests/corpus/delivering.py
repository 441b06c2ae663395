"""Delivering: puts the cases of the corpus where a stranger would, past our own producers.

Nothing here checks or repairs what it sends. Each broker gets bytes in its own form: an element of a
list, a row, a message with a table of headers.
"""

import base64
import json
import sqlite3
import struct
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from math import isfinite
from pathlib import Path
from typing import Any, Protocol

import hiredis
import msgspec

from tests.corpus.case import Case
from tests.servers.redis import exchange
from umbel.brokers.amqp.blocking import BlockingLink
from umbel.brokers.amqp.frames import Method, encode_publish
from umbel.brokers.amqp.handshake import locations_from_url
from umbel.brokers.interface.connection import DEFAULT_SEP as SEP

QUEUE = "celery"
EVENTS, REQUESTS, REPLIES = "celeryev", "celery.pidbox", "reply.celery.pidbox"
FAR_S = 3600.0
_PROPERTIES = ("content_type", "content_encoding", "priority", "correlation_id", "reply_to", "expiration")


Addressed = tuple[str, str, Case]
"""An exchange, a routing key, and what is sent there."""

_CONTENT = {"content_type": "application/json", "content_encoding": "utf-8"}


class Delivering(Protocol):
    def tasks(self, cases: Sequence[Case]) -> None:
        """Into the queue, in this order."""
        ...

    def broadcast(self, cases: Sequence[Addressed]) -> None: ...
    def reply(self, key: str, cases: Sequence[Case]) -> None: ...
    def results(self, cases: Sequence[Case]) -> None:
        """Under the id that is the case's name."""
        ...


def delivering_to(broker: str, backend: str) -> Delivering:
    kinds: dict[str, type[Delivering]] = {"sqlite": _Sqlite, "redis": _Redis, "amqp": _Amqp}
    return kinds[broker.partition(":")[0]](broker, backend)  # type: ignore[call-arg]


class _Sqlite:
    def __init__(self, broker: str, backend: str) -> None:
        self._broker, self._backend = broker, backend

    def tasks(self, cases: Sequence[Case]) -> None:
        rows = [(QUEUE, 0, sqlite_row(case)) for case in cases]
        self._insert(self._broker, "INSERT INTO messages (queue, priority, message) VALUES (?, ?, ?)", rows)

    def broadcast(self, cases: Sequence[Addressed]) -> None:
        until = time.time() + FAR_S
        rows = [(to, key, case.raw or case.body, case.headers, until) for to, key, case in cases]
        into = (
            "INSERT INTO broadcasts (exchange, routing_key, body, headers, expires_at) VALUES (?, ?, ?, ?, ?)"
        )
        self._insert(self._broker, into, rows)

    def reply(self, key: str, cases: Sequence[Case]) -> None:
        self.broadcast([(REPLIES, key, case) for case in cases])

    def results(self, cases: Sequence[Case]) -> None:
        rows = [(case.name, _status(case), case.raw, time.time() + FAR_S) for case in cases]
        self._insert(self._backend, "INSERT INTO results VALUES (?, ?, ?, ?)", rows)

    def _insert(self, url: str, statement: str, rows: Iterable[Sequence[Any]]) -> None:
        with closing(sqlite3.connect(Path(url.removeprefix("sqlite:///")), timeout=30)) as db, db:
            db.executemany(statement, rows)


class _Redis:
    def __init__(self, broker: str, backend: str) -> None:
        self._port = int(broker.rpartition(":")[2].partition("/")[0])

    def tasks(self, cases: Sequence[Case]) -> None:
        self._ask([("LPUSH", QUEUE, redis_envelope(case)) for case in cases])

    def broadcast(self, cases: Sequence[Addressed]) -> None:
        self._ask(
            [
                ("PUBLISH", f"/0.{to}/{key}" if key else f"/0.{to}", redis_envelope(case))
                for to, key, case in cases
            ]
        )

    def reply(self, key: str, cases: Sequence[Case]) -> None:
        (bound,) = self._ask([("SMEMBERS", f"_kombu.binding.{REPLIES}")])
        assert isinstance(bound, (list, set))
        queues = [member.split(SEP.encode()) for member in bound]
        (queue,) = [parts[2] for parts in queues if parts[0] == key.encode()]
        self._ask([("LPUSH", queue, redis_envelope(case)) for case in cases])

    def results(self, cases: Sequence[Case]) -> None:
        self._ask([("SET", f"celery-task-meta-{case.name}", case.raw) for case in cases])

    def _ask(self, commands: Sequence[tuple[Any, ...]]) -> list[object]:
        answers = exchange(self._port, list(commands))
        assert not [answer for answer in answers if isinstance(answer, hiredis.ReplyError)], answers
        return answers


class _Amqp(_Sqlite):
    """Results are in a SQLite file here: see `tests/scenarios/places.py`."""

    def tasks(self, cases: Sequence[Case]) -> None:
        with self._linked() as link:
            link.call(Method.QUEUE_DECLARE, 0, QUEUE, False, True, False, False, False, {})
            link.publish([encode_publish(1, "", QUEUE, amqp_properties(case), case.body) for case in cases])

    def broadcast(self, cases: Sequence[Addressed]) -> None:
        with self._linked() as link:
            link.publish(
                [encode_publish(1, to, key, amqp_properties(case), case.body) for to, key, case in cases]
            )

    def _linked(self) -> closing[BlockingLink]:
        return closing(BlockingLink(locations_from_url(self._broker)[0], timeout_s=10.0, name="corpus"))


def sqlite_row(case: Case) -> bytes:
    if case.raw is not None:
        return case.raw
    stated = {**_CONTENT, "priority": 0, "correlation_id": case.name, "reply_to": "", "expiration": None}
    stated |= case.properties
    said = [case.headers, case.body, *(stated[name] for name in _PROPERTIES)]
    try:
        return msgspec.msgpack.encode(said)
    except (OverflowError, UnicodeEncodeError):  # what MessagePack cannot say is said as text
        return msgspec.msgpack.encode([one if isinstance(one, bytes) else ascii(one) for one in said])


def redis_envelope(case: Case) -> bytes:
    if case.raw is not None:
        return case.raw
    stated: dict[str, Any] = {
        **_CONTENT,
        "correlation_id": case.name,
        "body_encoding": "base64",
        "delivery_tag": case.name,
    }
    stated |= {"delivery_info": {"exchange": "", "routing_key": QUEUE}, **case.properties}
    content = [json.dumps(stated.pop(name)).encode() for name in _CONTENT]
    return b'{"body": "%b", "content-type": %b, "content-encoding": %b, "headers": %b, "properties": %b}' % (
        base64.b64encode(case.body),
        *content,
        case.headers,
        json.dumps(stated).encode(),
    )


def amqp_properties(case: Case) -> bytes:
    """What AMQP cannot say is said as it can: other headers as a text in the table, odd values as text."""
    if case.raw is not None:
        return case.raw
    stated = {**_CONTENT, "correlation_id": case.name, **case.properties}
    try:
        headers = json.loads(case.headers)
        table = _table(headers if isinstance(headers, dict) else {"headers": headers})
    except (ValueError, RecursionError):
        table = _table({"headers": case.headers})
    parts = [(0x8000, _short(stated["content_type"])), (0x4000, _short(stated["content_encoding"]))]
    parts.append((0x2000, table))
    if isinstance(priority := stated.get("priority"), int):
        parts.append((0x0800, bytes((priority & 255,))))
    for flag, name in ((0x0400, "correlation_id"), (0x0200, "reply_to")):
        if stated.get(name):
            parts.append((flag, _short(stated[name])))
    return sum(flag for flag, _ in parts).to_bytes(2) + b"".join(part for _, part in parts)


def _table(found: Mapping[str, Any]) -> bytes:
    data = b"".join(_short(name) + _value(value) for name, value in found.items())
    return struct.pack(">L", len(data)) + data


def _value(value: Any) -> bytes:
    match value:
        case None:
            return b"V"
        case bool():
            return b"t" + bytes((value,))
        case int() if -(2**63) <= value < 2**63:
            return b"l" + struct.pack(">q", value)
        case float() if isfinite(value):  # RabbitMQ itself stumbles over the others
            return b"d" + struct.pack(">d", value)
        case dict():
            return b"F" + _table(value)
        case list():
            data = b"".join(map(_value, value))
            return b"A" + struct.pack(">L", len(data)) + data
    text = value if isinstance(value, bytes) else str(value).encode("utf-8", "surrogatepass")
    return b"S" + struct.pack(">L", len(text)) + text


def _short(text: object) -> bytes:
    data = str(text).encode("utf-8", "surrogatepass")[:255]
    return bytes((len(data),)) + data


def _status(case: Case) -> str:
    """The column that is looked at first; what is no result is called a success."""
    return "FAILURE" if b'"FAILURE"' in (case.raw or b"") else "SUCCESS"
