"""Elections: one row each, from the events of nodes.

The classic election (v1) is two sets, the candidates and who answered; the lowest candidate leads. An
election by the store (v2) reports its winners with their terms, and how it ended. Both are functions of
sets, so nothing depends on the order or the number of reports. They are few, so they are plain Python.
"""

from collections.abc import Callable, Iterable
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from umbel.events.tables import TABLES
from umbel.fold.columns import Events
from umbel.fold.schemas import SCHEMAS

_ELECT, _ACK, _ELECTED = "worker-elect", "worker-elect-ack", "worker-elected"
_CLOSED = ("done", "failed", "expired")
_FIELDS = (
    "type",
    "hostname",
    "pid",
    "clock",
    "id",
    "eid",
    "topic",
    "phase",
    "winner",
    "term",
    "attempt",
    "policy",
)
Told = dict[str, Any]
_ESCAPES = str.maketrans(
    {chr(code): f"\\u{code:04X}" for code in range(32)}
    | {"\b": "\\b", "\t": "\\t", "\n": "\\n", "\f": "\\f", "\r": "\\r", '"': '\\"', "\\": "\\\\"}
)


def elections(others: pa.Table) -> pa.Table:
    """From the events without a task."""
    told = _told(others)
    classic = _grouped((one for one in told if one["type"] in (_ELECT, _ACK)), "id")
    stored = _grouped((one for one in told if one["type"] == _ELECTED), "eid")
    rows = [
        *(_row(name, "v1", events, _classic(events)) for name, events in classic.items()),
        *(_row(name, "v2", events, _by_the_store(events)) for name, events in stored.items()),
    ]
    columns = {name: [row[name] for row in rows] for name in TABLES["elections"].names}
    schema = SCHEMAS["elections"]
    return pa.table([pa.array(columns[field.name], field.type) for field in schema], schema=schema)


def _told(others: pa.Table) -> list[Told]:
    kinds = pc.is_in(others.column("type"), value_set=pa.array([_ELECT, _ACK, _ELECTED]))
    events = Events(others.filter(pc.and_(kinds, pc.is_null(others.column("slot")))))
    columns = {name: events.column(name) for name in _FIELDS}
    columns["at_us"] = events.column("timestamp").cast(pa.int64())
    found: list[Told] = pa.table(columns).to_pylist()
    return found


def _grouped(told: Iterable[Told], by: str) -> dict[str, list[Told]]:
    found: dict[str, list[Told]] = {}
    for one in told:
        if one[by] is not None:
            found.setdefault(one[by], []).append(one)
    return found


def _row(name: str, protocol: str, events: list[Told], found: Told) -> Told:
    first, last = _greatest(events, "at_us", min), _greatest(events, "at_us")
    return {
        "election_id": name,
        "protocol": protocol,
        "topic": _greatest(events, "topic"),
        "first_at": first,
        "last_at": last,
        "duration_s": None if first is None else (last - first) / 1_000_000,
        **found,
    }


def _classic(events: list[Told]) -> Told:
    stood = _sorted_set(
        (one["clock"], _process(one), one["hostname"], one["pid"]) for one in events if one["type"] == _ELECT
    )
    acks = {one["hostname"] for one in events if one["type"] == _ACK} - {None}
    return {
        "winner": stood[0][2] if stood else None,
        "term": None,
        "outcome": "elected" if stood else None,
        "policy": None,
        "n_candidates": len(stood),
        "candidates": _json_list(
            _json_object(name=hostname, pid=pid, clock=clock) for clock, _, hostname, pid in stood
        ),
        "n_acks": len(acks),
        "attempts": 1,
        "violations": _json_list([] if stood else [_json_text("answers without a candidate")]),
    }


def _by_the_store(events: list[Told]) -> Told:
    elected = [one for one in events if one["phase"] == "elected"]
    won = _sorted_set((one["term"], one["attempt"], one["winner"], one["clock"]) for one in elected)
    reigns = {(one["term"], one["winner"]) for one in elected}
    done = {(one["term"], one["winner"]) for one in events if one["phase"] == "done"}
    last = max((_state(one) for one in events), key=_nulls_first)
    broken = ["two winners in one term"] if len({term for term, _ in reigns}) < len(reigns) else []
    broken += ["done by more than one winner"] if len(done) > 1 else []
    return {
        "winner": last[4],
        "term": last[0],
        "outcome": last[3],
        "policy": _greatest(events, "policy"),
        "n_candidates": len({winner for _, winner in reigns}),
        "candidates": _json_list(
            _json_object(name=winner, term=term, clock=clock) for term, _, winner, clock in won
        ),
        "n_acks": 0,
        "attempts": max(_greatest(events, "attempt") or 0, 1),
        "violations": _json_list(map(_json_text, broken)),
    }


def _state(one: Told) -> tuple[Any, ...]:
    """What makes one report later than another; its phase and winner are in it."""
    is_closed = None if one["phase"] is None else one["phase"] in _CLOSED
    return (one["term"], is_closed, one["at_us"], one["phase"], one["winner"])


def _process(one: Told) -> str:
    return ".".join(str(part) for part in (one["hostname"], one["pid"]) if part is not None)


def _greatest(events: list[Told], name: str, choose: Callable[..., Any] = max) -> Any:
    return choose((one[name] for one in events if one[name] is not None), default=None)


def _sorted_set(found: Iterable[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    return sorted(set(found), key=_nulls_first)


def _nulls_first(fields: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple((field is not None, 0 if field is None else field) for field in fields)


def _json_list(items: Iterable[str]) -> str:
    return f"[{','.join(items)}]"


def _json_object(**fields: str | int | None) -> str:
    """Without what is null."""
    told = (
        f"{_json_text(name)}:{_json_text(value) if isinstance(value, str) else value}"
        for name, value in fields.items()
        if value is not None
    )
    return f"{{{','.join(told)}}}"


def _json_text(text: str) -> str:
    return f'"{text.translate(_ESCAPES)}"'
