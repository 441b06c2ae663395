"""Segment: the one file a recorder has open, and the quarantine of what it could not read.

The file lies in `events/` under a name with a leading dot until it is finished, and gets its place
by the hour in which that is. All of this blocks, so it runs in the recorder's thread; only the
writing of a table goes on beside it, in a separate one.
"""

import os
import time
from base64 import b64encode
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from umbel.history.arrow import arrow, event_schema, parquet
from umbel.history.lake import SUFFIX, Lake, create, hidden, publish, write_file
from umbel.history.rows import Unreadable

UNREADABLE_MAX_BYTES = 16 * 1024 * 1024


class Segment:
    def __init__(self, lake: Lake, recorder: str, boot: int) -> None:
        self.number = 0
        self._lake = lake
        self._recorder = recorder
        self._boot = boot
        self.size_bytes = 0  # of what was written so far
        self._file: Any = None
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
        if self._file is None:
            self._lake.make_folder(self._lake.events)
            self._file = arrow().OSFile(str(create(self._unfinished())), "wb")
            self._writer = parquet().ParquetWriter(
                self._file, event_schema(), compression="zstd", compression_level=1
            )
        self._writing = self._thread.submit(self._write, table)

    def _write(self, table: Any) -> None:
        self._writer.write_table(table, row_group_size=max(1, table.num_rows))
        self.size_bytes = self._file.tell()

    def _wait(self) -> None:
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def finish(self) -> tuple[Path, int]:
        """The file under its name, and its size; from here on it never changes."""
        assert self._file is not None, "there is something to finish"
        self._wait()
        self._writer.close()
        size: int = self._file.tell()
        self._file.close()
        with self._unfinished().open("rb") as file:
            os.fsync(file.fileno())
        path = self._lake.hour_folder(time.time()) / f"{self.name}{SUFFIX}"
        publish(self._unfinished(), path)
        self._begin_next()
        return path, size

    def forget(self) -> None:
        """Remove what is half written."""
        with suppress(OSError):
            self._wait()
        if self._file is not None:
            if self._writer is not None:
                # On a full disk even this fails; the file goes all the same.
                with suppress(OSError, ValueError):
                    self._writer.close()
                self._writer.is_open = False  # or it tries again when it is collected
            with suppress(OSError):
                self._file.close()
            self._unfinished().unlink(missing_ok=True)
            self._begin_next()

    def close(self) -> None:
        """End its thread, when all is finished or forgotten."""
        self._thread.shutdown()

    def set_aside(self, unreadable: Sequence[Unreadable]) -> Path:
        """Keep entries that are no events, as they are, for a person to look at."""
        self._lake.make_folder(self._lake.quarantine)
        path = self._lake.quarantine / f"unreadable-{self.name}.jsonl"
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
        write_file(path, b"\n".join(lines) + b"\n")
        return path

    def _unfinished(self) -> Path:
        return hidden(self._lake.events / f"{self.name}{SUFFIX}")

    def _begin_next(self) -> None:
        self._file = self._writer = None
        self.size_bytes = 0
        self.number += 1
