"""What is read from a store or a disk, and where there are keys: seeds and readers for the fuzzers.

Letters, requests and tasks are read as a process with keys reads them: nothing but JSON before the
signature stands, whatever `accept_content` says. Some seeds hold a pickle that would leave its mark in
EXPLODED; while nobody unpickles what is unsigned, that stays empty.
"""

import logging
import pickle
from collections.abc import Callable, Sequence
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from tests.corpus.case import Case, Kind
from umbel.brokers.interface import DeadLetter
from umbel.control.failures import failed_task, retry_message
from umbel.errors import LakeError, WireError
from umbel.events.tables import REQUIRED
from umbel.fold import marks_file
from umbel.fold.senders import EVENTS_KEY, MARKS, SOURCES_KEY
from umbel.history.dealing import NewerFile, read_batches, read_marks, read_sources
from umbel.history.lake import COMPACTED, EVENTS, RECORDERS, Compacted, Lake, event_schema
from umbel.history.segment import RecorderMemory, all_memories
from umbel.outbox.table import decode_row, encode_rows
from umbel.protocol.delivery.trust import ClusterId, Signed
from umbel.protocol.pidbox import Request
from umbel.wire.call import TaskCall, TaskHeaders, decode_task, read_headers
from umbel.wire.control import decode_request, encode_request
from umbel.wire.message import JSON_CONTENT, Message, Outgoing
from umbel.wire.retried import requeued
from umbel.wire.signing import Keyring, Signer
from umbel.wire.task import encode_task, to_v2
from umbel.worker.run_directory import read_states
from umbel.worker.steps.state_store import SavedState, read_saved_state

T = TypeVar("T")
STORED: tuple[Kind, ...] = ("signed", "letter", "state", "row", "lake")
SIGNER = Signer(Keyring([("k", b"s" * 32)]), ClusterId("here"))
EVERY = ("json", "msgpack", "pickle")
EXPLODED: list[str] = []
_GROUP = f"{COMPACTED}/dt=2026-11-15/g"


def explode(where: str) -> list[Any]:
    EXPLODED.append(where)
    return []


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return explode, ("here",)


class _Stored(msgspec.Struct, array_like=True):
    """A letter as a broker stores it: its message, and the reason with what a worker added."""

    message: Message
    stored: str


class _Asked(msgspec.Struct, array_like=True):
    headers: bytes
    body: bytes


# -- seeds -------------------------------------------------------------------------------------------


@cache
def stored_seeds() -> Sequence[Case]:
    call = TaskCall(TaskHeaders(task="corpus_tasks.take", id="seed", root_id="seed"), [1], {"a": 2})
    plain, trusted = encode_task(call), encode_task(call, serializer="pickle")
    pickled = msgspec.structs.replace(trusted, body=pickle.dumps([[Bomb()], {}, {}], 4))
    both = (plain, pickled)
    signed, vouched = (
        [SIGNER.sign_task(Outgoing("q", one), 1.0).message for one in several]
        for several in ((plain, trusted), both)
    )
    headers, body = encode_request(Request("ping", {"x": 1}), 1, SIGNER, 1.0)
    asked = [_Asked(headers, body), _Asked(b"{}", pickle.dumps({"method": Bomb()}, 2))]
    letters = [_Stored(one, SIGNER.vouched("it failed", one, "q", 2.0)) for one in vouched]
    letters += [_Stored(one, "stale: it did not run") for one in both]
    row = SIGNER.keyring.sign_row(Outgoing("q", plain, 5.0), 1.0)
    state = {"node": "w@h", "pid": 1, "updated_boot_s": 1.0, "problem": "", "ready": True, "counters": {}}
    files = {
        "saved": msgspec.json.encode(SavedState("w@h", 5, 7)),
        "running": msgspec.json.encode(state),
        "pickled": pickle.dumps(Bomb(), 2),
    }
    lake = {
        "compacted": msgspec.json.encode(Compacted([f"{_GROUP}/b0.parquet"], ["x"], {"x": 1.5}, {"y": 3})),
        "memory": msgspec.json.encode(RecorderMemory("r", senders=[])),
        "events": _events(),
        "marks": _marks(),
    }
    return [
        *(_case("signed", n, _pack(one)) for n, one in enumerate((*signed, *both))),
        *(_case("signed", n, _pack(one), "request") for n, one in enumerate(asked)),
        *(_case("letter", n, _pack(one)) for n, one in enumerate(letters)),
        *(_case("state", n, data, to) for n, (to, data) in enumerate(files.items())),
        *(_case("row", n, encode_rows([one])[0][1]) for n, one in enumerate((row, Outgoing("q", pickled)))),
        *(_case("lake", n, data, to) for n, (to, data) in enumerate(lake.items())),
    ]


_pack = msgspec.msgpack.encode


def _case(kind: Kind, number: int, raw: bytes, to: str = "") -> Case:
    name = f"seed-{kind}-{to}{number}"
    return Case(name, "In order, before it was changed.", kind, (), {"else": "runs"}, raw=raw, to=to)


def _events() -> bytes:
    """A small file of events: the columns without which there is none."""
    schema = pa.schema([one for one in event_schema() if one.name in REQUIRED])
    return _parquet(pa.Table.from_arrays([_column(one.type) for one in schema], schema=schema))


def _marks() -> bytes:
    table = pa.Table.from_arrays([_column(one.type) for one in MARKS], schema=MARKS)
    return _parquet(table.replace_schema_metadata({EVENTS_KEY: b"3", SOURCES_KEY: b'{"a":["b"]}'}))


def _column(kind: pa.DataType) -> pa.Array:
    return pa.array(["x", "y", "x"] if pa.types.is_string(kind) else [1, 2, 3], kind)


def _parquet(table: pa.Table) -> bytes:
    sink = BytesIO()
    pq.write_table(table, sink, compression="zstd", store_schema=False, write_statistics=False)
    return sink.getvalue()


# -- readers -----------------------------------------------------------------------------------------

REFUSED = (WireError, LakeError, NewerFile, pa.ArrowException, OSError)


class Stored:
    """Reads what lies in a folder that it has for itself. Log entries about odd files are not wanted."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._lake = Lake(home / "lake", mode=0o700)
        self._run = home / "run"
        self._run.mkdir()
        self._readers: dict[str, Callable[[Case], object]] = {
            "signed": self._signed,
            "letter": self._letter,
            "state": self._state,
            "row": lambda case: SIGNER.published_row(decode_row(case.raw or b""), 2.0),
            "lake": self._in_lake,
        }
        logging.getLogger("umbel").setLevel(logging.CRITICAL)

    def read(self, case: Case) -> object:
        return self._readers[case.kind](case)

    def close(self) -> None:
        logging.getLogger("umbel").setLevel(logging.NOTSET)

    def _signed(self, case: Case) -> object:
        if case.to == "request":
            asked = _opened(case, _Asked)
            return asked and decode_request(asked.headers, asked.body, SIGNER, EVERY)
        message = _opened(case, Message)
        if message is None:
            return None
        proof, checked = SIGNER.check_task(message, "q")
        if not isinstance(proof, Signed) and message.content_type != JSON_CONTENT:
            return proof  # a queue that takes unsigned messages takes JSON
        opened = to_v2(checked)
        read_headers(opened)
        return decode_task(opened, accept=EVERY if isinstance(proof, Signed) else ("json",))

    def _letter(self, case: Case) -> object:
        found = _opened(case, _Stored)
        if found is None:
            return None
        letter = DeadLetter(1, "q", found.message, found.stored, 1, 3.0, failed=True)
        for even_if_used in (False, True):
            requeued(
                "q",
                found.message,
                starts=1,
                stored=found.stored,
                signer=SIGNER,
                now=2.0,
                even_if_used=even_if_used,
            )
        failed = failed_task(letter)
        return failed and retry_message(failed, SIGNER, accept=EVERY, even_if_used=True)

    def _state(self, case: Case) -> object:
        path = self._run / ("w.json" if case.to == "running" else "w.state")
        path.write_bytes(case.raw or b"")
        try:
            return read_states(self._run) if case.to == "running" else read_saved_state(path)
        finally:
            for left in self._run.iterdir():
                left.unlink()

    def _in_lake(self, case: Case) -> object:
        names = {
            "compacted": f"{COMPACTED}/_manifest/000001.json",
            "memory": f"{RECORDERS}/r.json",
            "events": f"{EVENTS}/dt=2026-11-15/hour=07/ev-r-1-1.parquet",
            "marks": marks_file(_GROUP),
        }
        name, store = names[case.to], self._lake.store
        store.put(name, case.raw or b"")
        try:
            match case.to:
                case "compacted":
                    return self._lake.read_compacted()
                case "memory":
                    return all_memories(self._lake)
                case "events":
                    return [one.num_rows for one in read_batches(store, name)]
            return read_marks(store, _GROUP), read_sources(store, _GROUP)
        finally:
            store.delete([name])


def _opened(case: Case, kind: type[T]) -> T | None:
    """What the test itself packed; None for what is not even that, which no reader of ours would see."""
    try:
        return msgspec.msgpack.decode(case.raw or b"", type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
