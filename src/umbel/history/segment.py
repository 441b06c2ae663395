"""Segment: the file that a recorder writes, and the state that it needs after a restart.

Entries that are not valid events go to the quarantine. The state of a recorder, with the sequence numbers
that it has recorded for each sender, is stored in the lake next to the files.
"""

import time
from base64 import b64encode
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import msgspec

from umbel.errors import LakeError
from umbel.events.reorder import KnownSender, Run, Sequences
from umbel.history.lake import (
    EVENTS,
    QUARANTINE,
    RECORDERS,
    SUFFIX,
    Lake,
    arrow,
    compute,
    event_writer,
    hour_folder,
)
from umbel.history.rows import UnreadableEntry
from umbel.stores.interface import Draft
from umbel.wire.values import UNREADABLE

# ---- segment ---------------------------------------------------------------------------------------

UNREADABLE_MAX_BYTES = 16 * 1024 * 1024


class Segment:
    """Writes the current file of a recorder, and entries that it cannot read to the quarantine.

    The file is a draft until `finish` publishes it in the folder of the current hour, so readers never see
    half a file. All methods block and belong to the recorder's thread; only Parquet writing runs in another
    thread.
    """

    def __init__(self, lake: Lake, recorder: str, boot: int) -> None:
        self.number = 0
        self._store = lake.store
        self._recorder = recorder
        self._boot = boot
        self.size_bytes = 0  # of the row groups that are written
        self._draft: Draft | None = None
        self._writer: Any = None
        self._thread = ThreadPoolExecutor(1, "umbel-segment")
        self._writing: Future[None] | None = None

    @property
    def name(self) -> str:
        """The name of the current file, without its folder and suffix."""
        return f"ev-{self._recorder}-{self._boot}-{self.number:06}"

    def write(self, table: Any) -> None:
        """Start to append the rows as a row group, and return. The next call raises the error if writing
        fails.

        Arrow releases Python's global lock while it writes. At most one table is being written; the next
        call waits.
        """
        self._wait()
        if self._draft is None:
            self._draft = self._store.draft(f"{EVENTS}/{self.name}{SUFFIX}")
            self._writer = event_writer(self._draft.sink)
        self._writing = self._thread.submit(self._write, table, self._draft)

    def _write(self, table: Any, draft: Draft) -> None:
        """Write a table as a row group. This runs in the writing thread."""
        self._writer.write_table(table, row_group_size=max(1, table.num_rows))
        self.size_bytes = draft.sink.tell()

    def _wait(self) -> None:
        """Wait for the last table to be written, and raise its error."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def finish(self) -> tuple[str, int]:
        """Publish the file, and return its name and size. A published file never changes."""
        assert self._draft is not None, "finish() needs a file with rows"
        self._wait()
        self._writer.close()
        size: int = self._draft.sink.tell()
        name = f"{EVENTS}/{hour_folder(time.time())}/{self.name}{SUFFIX}"
        self._draft.publish(name)
        self._begin_next()
        return name, size

    def forget(self) -> None:
        """Discard the unfinished file."""
        with suppress(OSError):
            self._wait()
        if self._draft is not None:
            if self._writer is not None:
                # Closing fails on a full disk. The draft is removed anyway.
                with suppress(OSError, ValueError):
                    self._writer.close()
                self._writer.is_open = False  # otherwise the garbage collector tries to close it again
            self._draft.forget()
            self._begin_next()

    def close(self) -> None:
        """Stop the writing thread. Call `finish` or `forget` first."""
        self._thread.shutdown()

    def set_aside(self, unreadable: Sequence[UnreadableEntry]) -> str:
        """Write entries that are not valid events to the quarantine, unchanged, and return the file's
        name.
        """
        name = f"{QUARANTINE}/unreadable-{self.name}.jsonl"
        lines: list[bytes] = []
        room = UNREADABLE_MAX_BYTES
        for refused in unreadable:
            room -= len(refused.entry.body)
            body = b64encode(refused.entry.body).decode() if room >= 0 else None
            line = {
                "offset": refused.entry.offset,
                "recorded_at": refused.entry.recorded_at,
                "routing_key": refused.entry.routing_key,
                "why": refused.why,
                "size": len(refused.entry.body),
                "body": body,
            }
            lines.append(msgspec.json.encode(line))
        self._store.put(name, b"\n".join(lines) + b"\n")
        return name

    def _begin_next(self) -> None:
        """Start the next file."""
        self._draft = self._writer = None
        self.size_bytes = 0
        self.number += 1


# ---- numbering -------------------------------------------------------------------------------------

_SENDER = ("hostname", "pid", "inc")


def account_numbers(sequences: Sequences, table: Any, now: float) -> None:
    """Update `sequences` with the sequence numbers of all senders in a table of rows.

    The numbers of a sender nearly always continue without a gap. Aggregates of the columns show that
    cheaply. Only otherwise the numbers are sorted, because events that are out of order within a table are
    not a gap.
    """
    ask = compute()
    numbered = table.select([*_SENDER, "seq", "timestamp"])
    numbered = numbered.filter(ask.and_(ask.is_valid(numbered["seq"]), ask.is_valid(numbered["inc"])))
    asked = [("seq", "min"), ("seq", "max"), ("seq", "count_distinct")]
    for counted in numbered.group_by([*_SENDER], use_threads=False).aggregate(asked).to_pylist():
        sender = counted["hostname"], counted["pid"], counted["inc"]
        first, last = counted["seq_min"], counted["seq_max"]
        is_whole = last - first + 1 == counted["seq_count_distinct"]
        if is_whole and sequences.goes_on(sender, first):
            sequences.saw(sender, [(first, last, 0)], now)
            continue
        theirs = numbered
        for name, value in zip(_SENDER, sender, strict=True):
            theirs = theirs.filter(ask.equal(theirs[name], value))
        sequences.saw(sender, _runs(theirs), now)


def _runs(theirs: Any) -> list[Run]:
    """Return the sequence numbers of one sender as runs without a gap."""
    library, ask = arrow(), compute()
    ordered = theirs.sort_by("seq")
    numbers = ordered["seq"].combine_chunks()
    times = ordered["timestamp"].cast(library.int64())
    steps = ask.subtract(numbers[1:], numbers[:-1])
    begins = [0, *(place + 1 for place in ask.indices_nonzero(ask.greater(steps, 1)).to_pylist())]
    ends = [*(place - 1 for place in begins[1:]), len(numbers) - 1]
    columns = (numbers.take(begins), numbers.take(ends), times.take(begins))
    return list(zip(*(column.to_pylist() for column in columns), strict=True))


# ---- memory ----------------------------------------------------------------------------------------


class RecorderMemory(msgspec.Struct):
    """The stored state of a recorder: its progress, and counts since its first run on this lake.

    It is written after each file and before the events of that file are acknowledged. A recorder that dies
    in between reads these events again and gets the same result, so the state need not be exact. Without it,
    only gaps that span the restart are not detected.
    """

    name: str
    began_us: int = 0  # when the recorder was registered with the broker
    updated_at: float = 0.0
    acknowledged: int = 0
    files: int = 0
    events: int = 0
    size_bytes: int = 0
    gaps: int = 0
    missing: int = 0  # number of events in those gaps
    lost: int = 0  # events that the full log dropped before they were read
    lost_told: int = 0  # the broker's count of lost events when it was last recorded
    unreadable: int = 0
    deaf_s: float = 0.0  # seconds without a subscription to events of Celery workers
    starts: int = 0
    senders: list[KnownSender] = []


def read_memory(lake: Lake, name: str) -> RecorderMemory | None:
    """Return the stored state of a recorder, or None if it never ran on this lake. Raise LakeError if the
    file is unreadable.
    """
    try:
        return msgspec.json.decode(lake.store.read(_file_of(name)), type=RecorderMemory)
    except FileNotFoundError:
        return None
    except (OSError, *UNREADABLE) as error:
        raise LakeError(
            f"cannot read {lake.store.where}/{_file_of(name)}: {error}; move the file away, and the recorder"
            " starts a new one"
        ) from None


def write_memory(lake: Lake, memory: RecorderMemory) -> None:
    """Store the state of a recorder in the lake."""
    lake.store.put(_file_of(memory.name), msgspec.json.encode(memory))


def all_memories(lake: Lake) -> list[RecorderMemory]:
    """Return the stored state of all recorders of this lake."""
    names = [name.removeprefix(f"{RECORDERS}/") for name in lake.store.names(RECORDERS)]
    stems = [name.removesuffix(".json") for name in names if name.endswith(".json") and "/" not in name]
    return [memory for stem in stems if (memory := read_memory(lake, stem)) is not None]


def _file_of(name: str) -> str:
    """Return the path of a recorder's state."""
    return f"{RECORDERS}/{name}.json"
