"""The recorder's decisions (D1): what is acknowledged is on disk, wherever the recorder dies."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from umbel.protocol.leadership.lease import (
    LAST_READS_MAX,
    Acknowledge,
    BeginRecording,
    EntriesRead,
    FactsAdded,
    FileFinished,
    FinishFile,
    ForgetFile,
    ReadAfter,
    Recording,
    RecordingEffect,
    RecordingEnded,
    RotationSettings,
    StopRecording,
    WritingFailed,
)
from umbel.protocol.machine import Tick

SMALL = RotationSettings(file_max_bytes=1000, file_max_rows=10, file_max_age_s=60.0, idle_poll_s=0.25)


def begun() -> Recording:
    recording = Recording(SMALL)
    assert recording.step(BeginRecording(5), 0.0) == [ReadAfter(5)]
    return recording


def test_reading_goes_on_while_there_is_more_and_then_waits() -> None:
    recording = begun()
    assert recording.step(EntriesRead(8, 3, 100, more=True), 0.0) == [ReadAfter(8)]
    assert recording.step(EntriesRead(8, 0, 100, more=False), 1.0) == []
    assert recording.deadline == 1.25
    assert recording.step(Tick(), 1.1) == []
    assert recording.step(Tick(), 1.25) == [ReadAfter(8)]


@pytest.mark.parametrize(("rows", "size", "now"), [(10, 1, 0.0), (1, 1000, 0.0), (1, 1, 60.0)])
def test_a_file_is_finished_when_it_is_long_large_or_old_enough(rows: int, size: int, now: float) -> None:
    recording = begun()
    recording.step(EntriesRead(6, 1, 1, more=False), 0.0)
    assert recording.step(EntriesRead(9, rows, size, more=True), now) == [FinishFile(9)]
    assert recording.step(FileFinished(9), now) == [Acknowledge(9), ReadAfter(9)]


def test_a_file_grows_old_although_nothing_more_comes() -> None:
    recording = begun()
    recording.step(EntriesRead(6, 1, 1, more=False), 0.0)
    recording.step(EntriesRead(6, 0, 1, more=False), 59.9)
    assert recording.step(Tick(), 60.2) == [FinishFile(6)]


def test_what_could_not_be_written_is_read_again_after_a_while() -> None:
    recording = begun()
    recording.step(EntriesRead(20, 10, 1, more=True), 0.0)
    assert recording.step(WritingFailed(), 1.0) == [ForgetFile()]
    assert (recording.acknowledged, recording.deadline) == (5, 2.0)
    assert recording.step(Tick(), 2.0) == [ReadAfter(5)]
    recording.step(EntriesRead(20, 10, 1, more=True), 2.0)
    recording.step(WritingFailed(), 2.0)
    assert recording.deadline == 4.0


def test_stopping_finishes_and_acknowledges_what_was_read() -> None:
    recording = begun()
    recording.step(EntriesRead(7, 2, 1, more=False), 0.0)
    assert recording.step(StopRecording(), 0.1) == [ReadAfter(7)]  # what came last is recorded too
    assert recording.step(EntriesRead(8, 1, 1, more=False), 0.1) == [FinishFile(8)]
    assert recording.step(FileFinished(8), 0.2) == [Acknowledge(8), RecordingEnded()]


def test_stopping_ends_although_others_tell_for_ever() -> None:
    recording = begun()
    recording.step(StopRecording(), 0.0)
    reads = 0
    while recording.step(EntriesRead(6 + reads, 1, 1, more=True), 0.0) == [ReadAfter(6 + reads)]:
        reads += 1
        assert reads < LAST_READS_MAX
    assert recording.step(FileFinished(6 + reads), 0.0)[-1] == RecordingEnded()


def test_stopping_does_not_wait_for_a_disk_that_is_full() -> None:
    recording = begun()
    recording.step(EntriesRead(20, 10, 1, more=True), 0.0)
    recording.step(WritingFailed(), 1.0)
    assert recording.step(StopRecording(), 1.1) == [RecordingEnded()]


def test_entries_that_give_no_rows_are_acknowledged_without_a_file() -> None:
    recording = begun()
    recording.step(StopRecording(), 0.0)
    assert recording.step(EntriesRead(7, 0, 0, more=False), 0.1) == [Acknowledge(7), RecordingEnded()]


def test_a_log_that_begins_anew_is_read_from_its_beginning_after_what_is_open_was_finished() -> None:
    recording = begun()
    recording.step(EntriesRead(7, 2, 1, more=False), 0.0)
    assert recording.step(BeginRecording(0), 1.0) == [FinishFile(0)]
    assert recording.step(FileFinished(0), 1.0) == [ReadAfter(0)]


def test_the_recorders_own_rows_make_a_file_too() -> None:
    recording = begun()
    recording.step(FactsAdded(1), 0.0)
    recording.step(StopRecording(), 1.0)
    assert recording.step(EntriesRead(5, 0, 0, more=False), 1.0) == [FinishFile(5)]


# ---- any course, killed anywhere -------------------------------------------------------------------


@dataclass
class World:
    """A log, a disk and a recorder that may die before any effect, or find the disk full."""

    log: list[int] = field(default_factory=list)
    acknowledged: int = 0
    files: list[list[int]] = field(default_factory=list)
    open_file: list[int] = field(default_factory=list)
    now: float = 0.0
    disk_is_full: bool = False
    ended: bool = False

    def check(self) -> None:
        on_disk = {event for file in self.files for event in file}
        assert set(self.log[: self.acknowledged]) <= on_disk, "acknowledged, and on no disk"

    def live(self, script: Iterable[str]) -> None:
        """One life of a recorder: until it is killed, it has ended or the script is over."""
        self.open_file = []
        machine = Recording(RotationSettings(file_max_rows=3))
        effects = machine.step(BeginRecording(self.acknowledged), self.now)
        for word in script:
            self.now += 0.3
            if word == "log":
                self.log.extend(range(len(self.log), len(self.log) + 4))
            elif word == "kill":
                return
            elif word == "full":
                self.disk_is_full = not self.disk_is_full
            elif word == "stop":
                effects += machine.step(StopRecording(), self.now)
            elif effects:
                effects = effects[1:] + self.perform(effects[0], machine)
            else:
                effects = machine.step(Tick(), self.now)
            self.check()
            if self.ended:
                return

    def perform(self, effect: RecordingEffect, machine: Recording) -> list[RecordingEffect]:
        match effect:
            case ReadAfter(place):
                found = self.log[place : place + 3]
                self.open_file += found
                read = EntriesRead(
                    place + len(found), len(found), 10 * len(self.open_file), more=len(found) == 3
                )
                return machine.step(read, self.now)
            case FinishFile(through):
                if self.disk_is_full:
                    return machine.step(WritingFailed(), self.now)
                self.files.append(self.open_file)
                self.open_file = []
                return machine.step(FileFinished(through), self.now)
            case Acknowledge(place):
                self.acknowledged = max(self.acknowledged, place)
                return []
            case ForgetFile():
                self.open_file = []
                return []
            case RecordingEnded():
                self.ended = True
                return []


words = st.sampled_from(["go", "go", "go", "go", "log", "kill", "full", "stop"])


@given(st.lists(st.lists(words, max_size=40), max_size=8))
def test_killed_anywhere_nothing_is_lost(lives: list[list[str]]) -> None:
    world = World()
    for script in lives:
        world.ended = False
        world.live(script)
    world.ended = world.disk_is_full = False
    world.live(["log", *["go"] * 400, "stop", *["go"] * 10])
    assert world.ended
    assert {event for file in world.files for event in file} == set(world.log)
    assert world.acknowledged == len(world.log)
