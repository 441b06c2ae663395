"""Mutator: hostile inputs without end, made from the corpus by changes that know its structure.

What is JSON or MessagePack is taken apart, changed at one or a few places and put together again, so
that most inputs get past the first check of their reader and meet the next one. Some are changed as
bytes after that. Input number n of a seed is always the same, so a number is all that a replay needs.
"""

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from tests.corpus.case import Case, Kind, cases
from tests.fuzz.seeds import seeds
from umbel.wire.frames import StopChild, encode_frame

SEED_MAX_BYTES = 4096
NODES_MAX = 400
_BIG = 10**30

HOSTILE: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 255, 256, 2**31, 2**53, 2**63 - 1, 2**63, 2**64, -(2**63), -(2**63) - 1,
    _BIG, -_BIG, 10**400, 0.0, -0.0, 0.5, 1e-300, 1e300, 1.7e308, float("nan"), float("inf"), float("-inf"),
    "", "x", "0", "-1", "soon", "nan", "1e400", "\0", "a\0b", "\ud800", "\udcff", "\x1b[2J\n", "\u202e",
    "\ufeff", "é", "😀", "x" * 300, "9" * 5000, "2026-01-01T00:00:00", "9999-12-31T23:59:59-14:00",
    "0001-01-01T00:00:00+14:00", "__class__", "../../x", "corpus_tasks.take", "celery", "amq.x", "a.b.#.*",
    "application/x-python-serialize", "gzip", "base64", "SUCCESS", "FAILURE", "worker-heartbeat", "ping",
    [], {}, [[]], [None], {"": None}, {"a": {"b": {"c": []}}}, [1, "x", None, {}], [[[[[[[[[[]]]]]]]]]],
    {"__type__": "datetime", "__value__": "2026-01-01T00:00:00"}, {"__type__": "uuid", "__value__": 5},
    {"__type__": "decimal", "__value__": "1e999999"}, {"__type__": "bytes", "__value__": "x"},
    {"__type__": [], "__value__": {}}, {"task": "corpus_tasks.take"}, {"task": "a", "subtask_type": "group"},
)  # fmt: skip
KEYS = (
    "task", "id", "eta", "expires", "retries", "timelimit", "group", "group_index", "root_id", "stamps",
    "stamped_headers", "compression", "redelivered", "umbel_unique", "ignore_result", "argsrepr", "shadow",
    "args", "kwargs", "callbacks", "errbacks", "chain", "chord", "options", "subtask_type", "immutable",
    "queue", "priority", "countdown", "time_limit", "taskset", "umbel", "starts", "not_before", "body",
    "headers", "properties", "delivery_info", "body_encoding", "expiration", "correlation_id", "type",
    "hostname", "clock", "timestamp", "pid", "freq", "inc", "subject", "runs", "eid", "phase", "method",
    "arguments", "destination", "pattern", "matcher", "ticket", "reply_to", "status", "result", "traceback",
    "children", "exc_type", "exc_message", "exc_module", "__type__", "__value__", "", "\ud800",
)  # fmt: skip


class Mutator:
    """Half of what it makes comes from seeds in order, the other half from the corpus."""

    def __init__(self, seed: int, *kinds: Kind, brokers: Sequence[str]) -> None:
        self._seed = seed
        self._brokers = brokers
        self._sources = {
            broker: [_fitting(source, kinds, broker) for source in (seeds(), cases())] for broker in brokers
        }

    def input(self, number: int) -> tuple[str, Case]:
        """The broker that it is for, and the input."""
        chance = random.Random(self._seed << 32 | number)
        broker = chance.choice(self._brokers)
        source = chance.choice(self._sources[broker])
        made = _Change(chance, source).case(chance.choice(source))
        return broker, replace(made, name=f"fuzz-{self._seed}-{number}")


def _fitting(source: Sequence[Case], kinds: Sequence[Kind], broker: str) -> list[Case]:
    """Those of these kinds. A bomb takes a second each time, and all changes of it do the same."""
    return [
        case
        for case in source
        if (not kinds or case.kind in kinds)
        and (broker in case.brokers or not case.brokers)
        and max(map(len, (case.headers, case.body, case.raw or b""))) <= SEED_MAX_BYTES
        and "bomb" not in case.name
    ]


class _Change:
    def __init__(self, chance: random.Random, seeds: Sequence[Case]) -> None:
        self._chance = chance
        self._seeds = seeds

    def case(self, case: Case) -> Case:
        if case.raw is not None and not (case.body and self._chance.random() < 0.5):
            return replace(case, raw=self.payload(case.raw))
        part = self._chance.random()
        if case.properties and part < 0.15:
            return replace(case, properties=self._properties(case))
        if part < 0.55 and case.headers != b"{}":
            return replace(case, headers=self.payload(case.headers))
        return replace(case, body=self.payload(case.body))

    def payload(self, data: bytes) -> bytes:
        changed = data
        for decode, encode in _FORMS:
            try:
                tree = decode(data)
            except (ValueError, RecursionError, msgspec.MsgspecError):
                continue
            for _ in range(self._chance.choice((1, 1, 1, 2, 3))):
                tree = self._tree(tree)
            try:
                changed = encode(tree)
            except (ValueError, TypeError, OverflowError, RecursionError):  # what this form cannot say
                changed = self._bytes(data)
            break
        else:
            return self._bytes(data)
        return self._bytes(changed) if self._chance.random() < 0.15 else changed

    def _properties(self, case: Case) -> dict[str, Any]:
        name = self._chance.choice(sorted(case.properties))
        return {**case.properties, name: self._chance.choice(HOSTILE)}

    def _tree(self, tree: Any) -> Any:
        """Change one place of it. Trees are small: what is larger than NODES_MAX is replaced."""
        places = list(_places(tree))
        if not places:
            return self._value()
        container, key = self._chance.choice(places[:NODES_MAX])
        match self._chance.randrange(8):
            case 0 | 1 | 2:
                container[key] = self._value()
            case 3:
                container[key] = [container[key]]
            case 4 if isinstance(container, dict):
                container[self._chance.choice(KEYS)] = self._value()
            case 5 if isinstance(container, dict):
                container[self._chance.choice(KEYS)] = container.pop(key)
            case 6:
                del container[key]
            case _:
                container[key] = self._near(container[key])
        return tree

    def _value(self) -> Any:
        found = self._chance.choice(HOSTILE)
        return json.loads(json.dumps(found)) if isinstance(found, (dict, list)) else found

    def _near(self, value: Any) -> Any:
        """Something of another type that looks alike, or a neighbour of the same type."""
        match value:
            case bool() | None:
                return self._chance.choice((0, 1, "true", [value]))
            case int():
                return self._chance.choice(
                    (-value, value + 1, value * 2**40, float(max(-(2**60), min(value, 2**60))), str(value))
                )
            case float():
                return self._chance.choice((-value, value * 1e200, str(value)))
            case str():
                at = self._chance.randrange(len(value) + 1)
                return self._chance.choice(
                    (
                        value[:at],
                        value * 2,
                        value[::-1],
                        value + "\0",
                        value.encode().hex() if value.isascii() else "",
                        [value],
                        len(value),
                    )
                )
            case list():
                return self._chance.choice((value * 2, dict(enumerate_text(value)), value[:-1], None))
            case dict():
                return self._chance.choice((list(value.items()), list(value), {"x": value}, None))
        return None

    def _bytes(self, data: bytes) -> bytes:
        at, chance = self._chance.randrange(len(data) + 1), self._chance
        end = min(len(data), at + chance.randrange(1, 9))
        match chance.randrange(7):
            case 0:
                return data[:at]
            case 1:
                return data[:at] + chance.randbytes(chance.randrange(1, 5)) + data[at:]
            case 2:
                return data[:at] + data[end:]
            case 3:
                return data[:at] + data[at:end] * chance.choice((2, 50)) + data[end:]
            case 4 if at < len(data):
                return data[:at] + bytes((data[at] ^ 1 << chance.randrange(8),)) + data[at + 1 :]
            case 5:
                other = chance.choice(self._seeds)
                theirs = other.raw or other.body
                return data[:at] + theirs[chance.randrange(len(theirs) + 1) :]
            case _:
                return data[:at] + chance.choice(_TOKENS) + data[at:]


_TOKENS = (
    b'"', b"{", b"}", b"[", b"]", b",", b":", b"\\", b"\0", b"\xff", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"-",
    b"NaN", b"1e400", b"null", b'{"umbel": {', b"\\ud800", b"\xc6\xff\xff\xff\xff", b"\xdd\xff\xff\xff\xff",
    b"\xce", b"9" * 4400,
)  # fmt: skip


def enumerate_text(items: Sequence[Any]) -> list[tuple[str, Any]]:
    return [(str(number), item) for number, item in enumerate(items)]


def _places(tree: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) in it, outermost first, up to NODES_MAX."""
    found: list[tuple[Any, Any]] = []
    waiting = [tree]
    while waiting and len(found) < NODES_MAX:
        one = waiting.pop(0)
        keys: Sequence[Any] = (
            list(one) if isinstance(one, dict) else range(len(one)) if isinstance(one, list) else ()
        )
        for key in keys:
            found.append((one, key))
            waiting.append(one[key])
    return found


def _encode_json(tree: Any) -> bytes:
    return json.dumps(tree, separators=(",", ":")).encode("utf-8", "surrogatepass")


def _decode_msgpack(data: bytes) -> Any:
    tree = msgspec.msgpack.decode(data)
    if not isinstance(tree, (list, dict)):  # any byte is a small number
        raise ValueError("not a structure")  # noqa: TRY004
    return tree


def _decode_frame(data: bytes) -> Any:
    head = len(_FRAME_MARK) + 4
    if data[:4] != _FRAME_MARK or int.from_bytes(data[4:head]) != len(data) - head:
        raise ValueError("not one whole frame")
    return _decode_msgpack(data[head:])


def _encode_frame(tree: Any) -> bytes:
    data = msgspec.msgpack.encode(tree)
    return _FRAME_MARK + len(data).to_bytes(4) + data


_FRAME_MARK = bytes(encode_frame(StopChild())[:4])
_FORMS: tuple[tuple[Callable[[bytes], Any], Callable[[Any], bytes]], ...] = (
    (json.loads, _encode_json),
    (_decode_frame, _encode_frame),
    (_decode_msgpack, msgspec.msgpack.encode),
)
