"""Segment: the one file a recorder has open, and the quarantine of what it could not read.

The file lies in `events/` under a name with a leading dot until it is finished, and gets its place
by the hour in which that is. All of this blocks, so it runs in the recorder's thread.
"""

import os
import time
from base64 import b64encode
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from umbel.history.arrow import event_schema, parquet
from umbel.history.lake import SUFFIX, Lake, hidden, make_folder, publish, write_file
from umbel.history.rows import Unreadable

UNREADABLE_MAX_BYTES = 16 * 1024 * 1024


class _NoWriter:
    """Until Arrow has made one."""

    is_open = False

    def close(self) -> None:
        return


class Segment:
    def __init__(self, lake: Lake, recorder: str, boot: int) -> None:
        self.number = 0
        self._lake = lake
        self._recorder = recorder
        self._boot = boot
        self._file: BinaryIO | None = None
        self._writer: Any = None

    @property
    def size_bytes(self) -> int:
        return 0 if self._file is None or self._file.closed else self._file.tell()

    @property
    def name(self) -> str:
        return f"ev-{self._recorder}-{self._boot}-{self.number:06}"

    def write(self, table: Any) -> None:
        """Append the rows as a row group."""
        if self._file is None:
            make_folder(self._lake.events)
            file = self._unfinished().open("wb")
            self._file, self._writer = file, _NoWriter()
            self._writer = parquet().ParquetWriter(
                file, event_schema(), compression="zstd", compression_level=1
            )
        self._writer.write_table(table, row_group_size=max(1, table.num_rows))

    def finish(self) -> tuple[Path, int]:
        """The file under its name, and its size; from here on it never changes."""
        assert self._file is not None, "there is something to finish"
        self._writer.close()
        self._file.flush()
        os.fsync(self._file.fileno())
        size = self._file.tell()
        self._file.close()
        path = self._lake.hour_folder(time.time()) / f"{self.name}{SUFFIX}"
        publish(self._unfinished(), path)
        self._begin_next()
        return path, size

    def forget(self) -> None:
        """Remove what is half written."""
        if self._file is not None:
            # On a full disk even this fails; the file goes all the same.
            with suppress(OSError, ValueError):
                self._writer.close()
            self._writer.is_open = False  # or it tries again when it is collected
            with suppress(OSError):
                self._file.close()
            self._unfinished().unlink(missing_ok=True)
            self._begin_next()

    def set_aside(self, unreadable: Sequence[Unreadable]) -> Path:
        """Keep entries that are no events, as they are, for a person to look at."""
        make_folder(self._lake.quarantine)
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
        self.number += 1
