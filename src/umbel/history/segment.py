"""Segment: the file that a recorder writes, and what it must know after a restart.

Events that cannot be read go to the quarantine. Which sequence numbers of which sender are recorded is stored
in the lake, next to its files.
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
#
# The file that a recorder has open, and the quarantine of entries that it could not read.
#
# The file is a draft until it is finished; its folder is the hour of that moment. All of this blocks, so it
# runs in the recorder's thread; only the writing of a table runs in another thread meanwhile.

UNREADABLE_MAX_BYTES = 16 * 1024 * 1024


class Segment:
    """Writes the current file of a recorder and its quarantine; used from one thread."""

    def __init__(self, lake: Lake, recorder: str, boot: int) -> None:
        self.number = 0
        self._store = lake.store
        self._recorder = recorder
        self._boot = boot
        self.size_bytes = 0  # of what was written so far
        self._draft: Draft | None = None
        self._writer: Any = None
        self._thread = ThreadPoolExecutor(1, "umbel-segment")
        self._writing: Future[None] | None = None

    @property
    def name(self) -> str:
        """The name of the current file, without folder and suffix."""
        return f"ev-{self._recorder}-{self._boot}-{self.number:06}"

    def write(self, table: Any) -> None:
        """Append the rows as a row group, while the caller goes on; a failure is raised the next time.

        Arrow does that without Python's lock, into a separate file. One table waits at most.
        """
        self._wait()
        if self._draft is None:
            self._draft = self._store.draft(f"{EVENTS}/{self.name}{SUFFIX}")
            self._writer = event_writer(self._draft.sink)
        self._writing = self._thread.submit(self._write, table, self._draft)

    def _write(self, table: Any, draft: Draft) -> None:
        self._writer.write_table(table, row_group_size=max(1, table.num_rows))
        self.size_bytes = draft.sink.tell()

    def _wait(self) -> None:
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def finish(self) -> tuple[str, int]:
        """Publish the file and return its name and size; it never changes afterwards."""
        assert self._draft is not None, "there is something to finish"
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
                # On a full disk even this fails; the draft is removed anyway.
                with suppress(OSError, ValueError):
                    self._writer.close()
                self._writer.is_open = False  # or it tries again when it is collected
            self._draft.forget()
            self._begin_next()

    def close(self) -> None:
        """End the writing thread, after the file was finished or discarded."""
        self._thread.shutdown()

    def set_aside(self, unreadable: Sequence[UnreadableEntry]) -> str:
        """Write entries that are not events to the quarantine, unchanged, and return the file's name."""
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
        self._draft = self._writer = None
        self.size_bytes = 0
        self.number += 1


# ---- numbering -------------------------------------------------------------------------------------
#
# The sequence numbers of each sender's events in a table of rows, for `Sequences`.
#
# Nearly always the numbers of a sender continue without a hole, which aggregates of the columns show.
# Otherwise they are sorted first, because events that are out of order within a table are no gap.

_SENDER = ("hostname", "pid", "inc")


def account_numbers(sequences: Sequences, table: Any, now: float) -> None:
    """Note the sequence numbers of all senders in a table of rows."""
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
    """The sequence numbers of one sender, as runs without a gap."""
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
#
# What a recorder must know after a restart, stored in the lake next to its files.
#
# It is written after each file and before that file's events are acknowledged. A recorder that dies in
# between reads those events again and comes to the same result, so the memory need not be exact. Without
# it, only gaps that span the restart are not noticed.


class RecorderMemory(msgspec.Struct):
    """A recorder's progress and counts, since the recorder of this name first ran on this lake."""

    name: str
    began_us: int = 0  # when the recorder was registered with the broker
    updated_at: float = 0.0
    acknowledged: int = 0
    files: int = 0
    events: int = 0
    size_bytes: int = 0
    gaps: int = 0
    missing: int = 0  # events in those gaps
    lost: int = 0  # events that the broker's log dropped at its limit before they were read
    lost_told: int = 0  # the broker's count of lost events that is already recorded
    unreadable: int = 0
    deaf_s: float = 0.0  # seconds without a subscription to events of Celery's workers
    starts: int = 0
    senders: list[KnownSender] = []


def read_memory(lake: Lake, name: str) -> RecorderMemory | None:
    """A recorder's memory; None where it never ran on this lake. LakeError if it cannot be read."""
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
    """Store a recorder's memory in the lake."""
    lake.store.put(_file_of(memory.name), msgspec.json.encode(memory))


def all_memories(lake: Lake) -> list[RecorderMemory]:
    """The memories of all recorders of this lake."""
    names = [name.removeprefix(f"{RECORDERS}/") for name in lake.store.names(RECORDERS)]
    stems = [name.removesuffix(".json") for name in names if name.endswith(".json") and "/" not in name]
    return [memory for stem in stems if (memory := read_memory(lake, stem)) is not None]


def _file_of(name: str) -> str:
    return f"{RECORDERS}/{name}.json"
