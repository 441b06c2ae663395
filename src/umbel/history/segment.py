"""Segment: the one file a recorder has open, and the quarantine of what it could not read.

The file is a draft until it is finished, and gets its place by the hour in which that is. All of this
blocks, so it runs in the recorder's thread; only the writing of a table goes on beside it, in a separate
one.
"""

import time
from base64 import b64encode
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import msgspec

from umbel.history.arrow import event_writer
from umbel.history.lake import EVENTS, QUARANTINE, SUFFIX, Lake, hour_folder
from umbel.history.rows import Unreadable
from umbel.stores.interface import Draft

UNREADABLE_MAX_BYTES = 16 * 1024 * 1024


class Segment:
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
        """The file under its name, and its size; from here on it never changes."""
        assert self._draft is not None, "there is something to finish"
        self._wait()
        self._writer.close()
        size: int = self._draft.sink.tell()
        name = f"{EVENTS}/{hour_folder(time.time())}/{self.name}{SUFFIX}"
        self._draft.publish(name)
        self._begin_next()
        return name, size

    def forget(self) -> None:
        """Remove what is half written."""
        with suppress(OSError):
            self._wait()
        if self._draft is not None:
            if self._writer is not None:
                # On a full disk even this fails; the file goes all the same.
                with suppress(OSError, ValueError):
                    self._writer.close()
                self._writer.is_open = False  # or it tries again when it is collected
            self._draft.forget()
            self._begin_next()

    def close(self) -> None:
        """End its thread, when all is finished or forgotten."""
        self._thread.shutdown()

    def set_aside(self, unreadable: Sequence[Unreadable]) -> str:
        """Keep entries that are no events, as they are, for a person to look at."""
        name = f"{QUARANTINE}/unreadable-{self.name}.jsonl"
        lines: list[bytes] = []
        room = UNREADABLE_MAX_BYTES
        for one in unreadable:
            room -= len(one.entry.body)
            body = b64encode(one.entry.body).decode() if room >= 0 else None
            told = {
                "offset": one.entry.offset,
                "recorded_at": one.entry.recorded_at,
                "routing_key": one.entry.routing_key,
                "why": one.why,
                "size": len(one.entry.body),
                "body": body,
            }
            lines.append(msgspec.json.encode(told))
        self._store.put(name, b"\n".join(lines) + b"\n")
        return name

    def _begin_next(self) -> None:
        self._draft = self._writer = None
        self.size_bytes = 0
        self.number += 1
