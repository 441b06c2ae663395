"""Recording: when a recorder reads, closes a file, and tells the broker what is safe.

The broker's log is the journal: what is read but not yet in a finished file is not acknowledged,
so a recorder that dies at any moment reads it again. Its whole rule:

1. Read on from the last place read. Rows go into one open file.
2. Close the file when it is large enough, old enough, or the recorder stops.
3. Acknowledge the last place read only when the file is finished: synced and named.
4. When anything of 2 fails, forget the open file and read again from what is acknowledged.

So no event is acknowledged that is not in a finished file. One that was written and not yet
acknowledged when the recorder died is written twice; readers tell by its digest.

This rests on the log keeping what is not acknowledged. At its limit it does not; it counts what it
dropped then, and the recorder writes that number down.
"""

from dataclasses import dataclass
from typing import assert_never

from umbel.protocol.machine import Tick

LAST_READS_MAX = 20
RETRY_FIRST_S, RETRY_MAX_S = 1.0, 30.0


@dataclass(frozen=True, slots=True)
class RotationSettings:
    """A file is closed at so many bytes on disk, rows, or seconds after its first row."""

    file_max_bytes: int = 64 * 1024 * 1024
    file_max_rows: int = 2_000_000
    file_max_age_s: float = 60.0
    idle_poll_s: float = 0.25


@dataclass(frozen=True, slots=True)
class Begin:
    """So far the recorder has acknowledged, by the broker's account.

    Told again when the broker has lost its log and begins another one: what was read is written
    down then, and reading begins anew.
    """

    acknowledged: int


@dataclass(frozen=True, slots=True)
class EntriesRead:
    """So many rows are in the open file, which is so large; the last entry was at this place."""

    through: int
    rows: int
    file_bytes: int
    more: bool  # there is probably more to read at once


@dataclass(frozen=True, slots=True)
class FactsAdded:
    """The recorder put rows of its own into the open file."""

    rows: int


@dataclass(frozen=True, slots=True)
class FileFinished:
    """It is on disk under its name, with everything read up to that place."""

    through: int


@dataclass(frozen=True, slots=True)
class WritingFailed:
    """A full disk, a folder that is gone: what was in the open file is not on disk."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Read what there is, but no more than LAST_READS_MAX times: others may tell for ever. Finish it."""


@dataclass(frozen=True, slots=True)
class ReadAfter:
    """Read the entries after this place into the open file."""

    place: int


@dataclass(frozen=True, slots=True)
class FinishFile:
    through: int


@dataclass(frozen=True, slots=True)
class Acknowledge:
    place: int


@dataclass(frozen=True, slots=True)
class ForgetFile:
    """Remove what is half written, and whatever waits in memory for it."""


@dataclass(frozen=True, slots=True)
class Ended:
    """Everything that was read is acknowledged."""


Event = Begin | EntriesRead | FactsAdded | FileFinished | WritingFailed | Stop
Effect = ReadAfter | FinishFile | Acknowledge | ForgetFile | Ended


class Recording:
    def __init__(self, settings: RotationSettings | None = None) -> None:
        self.deadline: float | None = None
        self.acknowledged = 0
        self.through = 0
        self.rows = 0
        self.failures = 0
        self._settings = settings or RotationSettings()
        self._opened_at: float | None = None
        self._reading = False
        self._finishing = False
        self._stopping = False
        self._last_reads = LAST_READS_MAX

    def step(self, event: Event | Tick, now: float) -> list[Effect]:
        match event:
            case Begin(acknowledged):
                self.acknowledged = self.through = acknowledged
                return self._finish() if self.rows else self._read()
            case EntriesRead(through, rows, file_bytes, more):
                self._reading = False
                self.through = max(self.through, through)
                self._count(rows, now)
                return self._after_reading(file_bytes, more, now)
            case FactsAdded(rows):
                self._count(rows, now)
                return []
            case FileFinished(through):
                return self._finished(through)
            case WritingFailed():
                return self._failed(now)
            case Stop():
                return self._stop()
            case Tick():
                return self._tick(now)
            case _:
                assert_never(event)

    def _stop(self) -> list[Effect]:
        is_first, self._stopping = not self._stopping, True
        if not is_first or self._reading or self._finishing:
            return []
        return self._finish() if self.failures else self._read()

    def _count(self, rows: int, now: float) -> None:
        if rows and self._opened_at is None:
            self._opened_at = now
        self.rows += rows

    def _after_reading(self, file_bytes: int, more: bool, now: float) -> list[Effect]:
        settings = self._settings
        if self._stopping:
            self._last_reads -= 1
            return self._read() if more and self._last_reads > 0 else self._finish()
        if file_bytes >= settings.file_max_bytes or self.rows >= settings.file_max_rows or self._is_old(now):
            return self._finish()
        if more:
            return self._read()
        self.deadline = now + settings.idle_poll_s
        return []

    def _is_old(self, now: float) -> bool:
        return self._opened_at is not None and now - self._opened_at >= self._settings.file_max_age_s

    def _tick(self, now: float) -> list[Effect]:
        if self.deadline is None or now < self.deadline:
            return []
        return self._finish() if self._is_old(now) else self._read()

    def _read(self) -> list[Effect]:
        self.deadline = None
        self._reading = True
        return [ReadAfter(self.through)]

    def _finish(self) -> list[Effect]:
        self.deadline = None
        if self.rows:
            self._finishing = True
            return [FinishFile(self.through)]
        # Entries that gave no rows (nothing to read in them) are as safe as they will be.
        acknowledge = self._acknowledge(self.through)
        return [*acknowledge, Ended()] if self._stopping else [*acknowledge, *self._read()]

    def _finished(self, through: int) -> list[Effect]:
        assert self._finishing, "only a file that was to be finished can be"
        self._finishing, self._opened_at, self.rows, self.failures = False, None, 0, 0
        acknowledge = self._acknowledge(through)
        return [*acknowledge, Ended()] if self._stopping else [*acknowledge, *self._read()]

    def _acknowledge(self, place: int) -> list[Effect]:
        if place <= self.acknowledged:
            return []
        self.acknowledged = place
        return [Acknowledge(place)]

    def _failed(self, now: float) -> list[Effect]:
        self._reading = self._finishing = False
        self._opened_at, self.rows = None, 0
        self.through = self.acknowledged
        self.failures += 1
        if self._stopping:
            return [ForgetFile(), Ended()]
        self.deadline = now + min(RETRY_FIRST_S * 2 ** (self.failures - 1), RETRY_MAX_S)
        return [ForgetFile()]
