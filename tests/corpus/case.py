"""A case of the corpus: one hostile message, reply, event or frame, as a line of `KIND.jsonl` describes it.

README.md explains the format. Reading is strict: a line with an unknown field is an error, because a
corpus that is not read in full proves nothing.
"""

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

Kind = Literal[
    "task", "envelope", "event", "control", "reply", "result", "frame",
    "signed", "letter", "state", "row", "lake",  # the fuzzers' alone (`fuzz/stored.py`)
]  # fmt: skip
Broker = Literal["sqlite", "redis", "amqp"]
Expected = Literal["dead", "error", "ignored", "runs", "waits"]
BROKERS: tuple[Broker, ...] = get_args(Broker)
FOLDER = Path(__file__).parent


class _Line(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    about: str
    expect: Expected | dict[Broker | Literal["else"], Expected]
    brokers: list[Broker] = msgspec.field(default_factory=lambda: list(BROKERS))
    reason: str = ""
    headers: Any = None
    body: Any = None
    properties: dict[str, Any] = {}
    raw: Any = None
    to: str = ""


@dataclass(frozen=True, slots=True)
class Case:
    """`raw`: the whole envelope, payload or frame as bytes; else it is made of the other parts.

    `to`: the routing key of an event, the command that a reply answers, the reader of a frame, and
    for an envelope the exchange that it is broadcast on, if it is not put into the queue.
    """

    name: str
    about: str
    kind: Kind
    brokers: Sequence[Broker]
    expected: Mapping[str, Expected]
    reason: str = ""
    headers: bytes = b"{}"
    body: bytes = b""
    properties: Mapping[str, Any] = field(default_factory=dict)
    raw: bytes | None = None
    to: str = ""

    def expect(self, broker: str) -> Expected:
        return self.expected.get(broker) or self.expected["else"]

    @property
    def task_id(self) -> str:
        """As a reader without rules finds it; the name of the case where there is none."""
        for part in (self.headers, self.body):
            try:
                found = json.loads(part)
            except (ValueError, RecursionError):
                continue
            if isinstance(found, dict) and isinstance(found.get("id"), str) and found["id"]:
                return str(found["id"])
        return self.name


@cache
def cases() -> Sequence[Case]:
    """All of them, in the order of kinds and names."""
    return [case for path in sorted(FOLDER.glob("*.jsonl")) for case in read(path)]


def of(broker: Broker, *kinds: Kind) -> list[Case]:
    return [case for case in cases() if broker in case.brokers and (not kinds or case.kind in kinds)]


def changed(case: Case, words: Mapping[bytes, bytes]) -> Case:
    """The case with these words in its body replaced."""
    body = case.body
    for word, by in words.items():
        body = body.replace(word, by)
    return replace(case, body=body)


def read(path: Path) -> list[Case]:
    """The cases of a file, whose name is their kind."""
    kind = msgspec.convert(path.stem, Kind)
    with path.open(encoding="utf-8") as lines:
        return [_case(kind, line) for line in lines]


def _case(kind: Kind, line: str) -> Case:
    # Python's json, because lines may spell lone surrogates and those need no other care.
    found = msgspec.convert(json.loads(line), _Line)
    expected = {"else": found.expect} if isinstance(found.expect, str) else dict(found.expect)
    return Case(
        found.name,
        found.about,
        kind,
        found.brokers,
        {str(name): what for name, what in expected.items()},
        found.reason,
        b"{}" if found.headers is None else payload(found.headers),
        b"" if found.body is None else payload(found.body),
        found.properties,
        None if found.raw is None else payload(found.raw),
        found.to,
    )


def as_line(case: Case) -> str:
    """The case as a line of `KIND.jsonl`: what a fuzzer finds is added to the corpus by adding this line."""
    parts = {"headers": case.headers, "body": case.body or None, "raw": case.raw}
    payloads = {
        name: {"base64": base64.b64encode(part).decode()} for name, part in parts.items() if part is not None
    }
    fields = {"name": case.name, "about": case.about, "brokers": list(case.brokers), **payloads}
    if case.properties:
        fields["properties"] = dict(case.properties)
    if case.to:
        fields["to"] = case.to
    return json.dumps(fields | {"expect": dict(case.expected)})


def payload(said: Any) -> bytes:
    """The bytes that a payload of a line stands for."""
    match said:
        case str():
            return said.encode("utf-8", "surrogatepass")
        case {"base64": str(text)}:
            return base64.b64decode(text, validate=True)
        case {"repeat": part, "times": int(times)}:
            return payload(part) * times
        case {"join": list(parts)}:
            return b"".join(map(payload, parts))
        case {"json": value}:
            return json.dumps(value, separators=(",", ":")).encode()
    raise AssertionError(f"not a payload: {said!r}")
