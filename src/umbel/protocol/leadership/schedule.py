"""Schedule: which periodic tasks are due, each slot of each of them sent once, whichever node leads.

A slot is a moment that a rule names: every multiple of an interval since 1970, or the times of a
cron expression. Rules depend on nothing but time, so all nodes name the same slots. Beside each
entry stands a mark: the last slot that is settled, sent or passed over. The marks are part of the
lease that makes a node the leader, and they change in the same step in which the messages are
published, if that step finds the lease still held. So no slot is sent twice, whatever dies: a leader
that was cut off changes nothing, and the next one begins where the marks end.

An answer that got lost leaves a leader unsure. It reads the marks again and goes by them.

Where it stops being right: a broker that cannot publish and mark in one step (RabbitMQ) marks
first, so a leader that dies in between loses those slots. A slot is due by the leader's clock; marks
more than `AHEAD_MAX_S` ahead of it are taken for the work of a clock that was wrong, and dropped.
"""

from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from itertools import islice
from typing import Protocol

from umbel.protocol.leadership.coordination import Instant
from umbel.protocol.machine import Tick
from umbel.protocol.value import Value

CATCH_UP_MAX = 1000
SEND_MAX = 1000
LATE_S = 2.0
"""A slot that is sent no later than this was not missed, for entries that catch nothing up."""
AHEAD_MAX_S = 3600.0
FORGET_AFTER_S = 7 * 86_400.0
RECHECK_S = 5.0
"""So often the leader looks again, in case the wall clock was set."""


class CatchUp(StrEnum):
    """What becomes of slots that passed while nobody led."""

    NONE = "none"
    ONE = "one"  # the last of them is sent
    ALL = "all"  # each of them, the last `CATCH_UP_MAX` at most


class Rule(Protocol):
    """Which moments are slots, in microseconds since 1970."""

    def after(self, at_us: int) -> int:
        """The first slot after this moment."""
        ...

    def until(self, at_us: int) -> int:
        """The last slot that is not after this moment."""
        ...


class Every(Value):
    """Each multiple of an interval since 1970: the same slots on every node and after any restart."""

    interval_us: int

    def after(self, at_us: int) -> int:
        return (at_us // self.interval_us + 1) * self.interval_us

    def until(self, at_us: int) -> int:
        return at_us // self.interval_us * self.interval_us


class Entry(Value):
    name: str
    rule: Rule
    catch_up: CatchUp = CatchUp.ONE


class Slot(Value):
    name: str
    at_us: int


# ---- events ----------------------------------------------------------------------------------------


class Lead(Value):
    """This node leads, and these are the marks it was left."""

    marks: Mapping[str, int]


class Follow(Value):
    """This node leads no more."""


class Sent(Value):
    """What was asked for is done."""


class Unsure(Value):
    """Nobody knows whether what was asked for is done."""


class Refused(Value):
    """What was asked for is not done: another node leads."""


class MarksRead(Value):
    marks: Mapping[str, int]


class PausesRead(Value):
    """Those that are to pass, now and until other news."""

    names: frozenset[str]


# ---- effects ---------------------------------------------------------------------------------------


class Send(Value):
    """Publish these and keep the marks, in one step; answer with Sent, Unsure or Refused."""

    slots: tuple[Slot, ...]
    marks: Mapping[str, int]


class ReadMarks(Value):
    """Answer with MarksRead or Unsure."""


class ReadPauses(Value):
    """A new leader sends nothing before it knows what is paused. Answer with PausesRead or Follow."""


class Missed(Value):
    """Slots of this entry were passed over: so many, or more than can be counted."""

    name: str
    count: int
    last_us: int


class Unproven(Value):
    """Marked, maybe, but the answer was lost: where marking and sending are two steps, maybe not sent."""

    slots: tuple[Slot, ...]


Event = Lead | Follow | Sent | Unsure | Refused | MarksRead | PausesRead
Effect = Send | ReadMarks | ReadPauses | Missed | Unproven


class Schedule:
    def __init__(self, entries: Sequence[Entry]) -> None:
        self.leads = False
        self.deadline: float | None = None
        self._entries = {entry.name: entry for entry in entries}
        self._marks: dict[str, int] = {}
        self._paused: frozenset[str] = frozenset()
        self._left: Mapping[str, int] | None = None  # marks that are not taken up yet
        self._asked: Send | None = None  # and not answered yet

    def step(self, event: Event | Tick, now: Instant) -> list[Effect]:
        effects = self._decide(event, now)
        self.deadline = self._next_s(now) if self._is_free else None
        return effects

    @property
    def _is_free(self) -> bool:
        """Whether it leads and waits for nothing but time."""
        return self.leads and self._left is None and self._asked is None

    def _decide(self, event: Event | Tick, now: Instant) -> list[Effect]:
        match event:
            case Lead(marks):
                unproven = self._unproven(marks)
                self.leads, self._left = True, marks
                return [*unproven, ReadPauses()]
            case Follow():  # the answer to what was asked for is still to come
                self.leads, self._left = False, None
            case Refused():
                self.leads, self._left, self._asked = False, None, None
            case PausesRead(names):
                self._paused = names
                if self._left is not None:
                    left, self._left = self._left, None
                    return self._take_up(left, now)
            case Sent() if self._asked is not None:
                self._marks, self._asked = dict(self._asked.marks), None
                return self._look(now) if self.leads else []
            case Unsure() if self._asked is not None:
                return [ReadMarks()] if self.leads else self._unproven(None)
            case MarksRead(marks) if self._asked is not None:
                unproven = self._unproven(marks)
                return [*unproven, *self._take_up(marks, now)] if self.leads else unproven
            case Tick() if self._is_free:
                return self._look(now)
        return []

    def _unproven(self, marks: Mapping[str, int] | None) -> list[Effect]:
        """Give up what was asked for: those of its slots that are marked, or all if that is not known."""
        asked, self._asked = self._asked, None
        slots = () if asked is None else asked.slots
        if marks is not None:
            slots = tuple(slot for slot in slots if marks.get(slot.name, 0) >= slot.at_us)
        return [Unproven(slots)] if slots else []

    def _take_up(self, marks: Mapping[str, int], now: Instant) -> list[Effect]:
        """Go by the marks that were kept; an entry that has none begins now."""
        now_us = _us(now)
        ahead_us, old_us = now_us + int(AHEAD_MAX_S * 1e6), now_us - int(FORGET_AFTER_S * 1e6)
        kept = {
            name: mark
            for name, mark in marks.items()
            if mark <= ahead_us and (name in self._entries or mark > old_us)
        }
        self._marks = {**dict.fromkeys(self._entries, now_us), **kept}
        effects = self._look(now)
        if self._asked is None and self._marks != marks:
            effects.append(self._ask((), self._marks))
        return effects

    def _look(self, now: Instant) -> list[Effect]:
        now_us = _us(now)
        marks, slots, effects = dict(self._marks), list[Slot](), list[Effect]()
        for entry in self._entries.values():
            newest = entry.rule.until(now_us)
            if newest <= self._marks[entry.name]:
                continue
            if entry.name in self._paused:
                self._marks[entry.name] = marks[entry.name] = newest
                continue
            due, missed = self._due(entry, newest, now_us)
            if len(slots) + len(due) > SEND_MAX and slots:
                break  # the rest when this has been sent
            marks[entry.name] = newest
            slots += due
            if missed:
                effects.append(Missed(entry.name, missed, newest))
        if slots or effects:
            effects.append(self._ask(tuple(slots), marks))
        return effects

    def _due(self, entry: Entry, newest: int, now_us: int) -> tuple[list[Slot], int]:
        """What is to be sent of an entry, oldest first, and how many slots are passed over."""
        passed = list(islice(_back(entry.rule, newest, self._marks[entry.name]), CATCH_UP_MAX + 1))
        if entry.catch_up is CatchUp.ALL:
            sent = passed[:CATCH_UP_MAX]
        elif entry.catch_up is CatchUp.ONE or newest >= now_us - int(LATE_S * 1e6):
            sent = passed[:1]
        else:
            sent = []
        return [Slot(entry.name, at_us) for at_us in reversed(sent)], len(passed) - len(sent)

    def _ask(self, slots: tuple[Slot, ...], marks: Mapping[str, int]) -> Send:
        self._asked = Send(slots, dict(marks))
        return self._asked

    def _next_s(self, now: Instant) -> float:
        now_us = _us(now)
        wait_us = min(
            (max(0, entry.rule.after(self._marks[entry.name]) - now_us) for entry in self._entries.values()),
            default=int(RECHECK_S * 1e6),
        )
        return now.boot_s + min(wait_us / 1e6, RECHECK_S)


def _back(rule: Rule, newest: int, mark: int) -> Iterator[int]:
    """The slots after the mark, newest first."""
    at_us = newest
    while at_us > mark:
        yield at_us
        at_us = rule.until(at_us - 1)


def _us(now: Instant) -> int:
    return int(now.wall_s * 1_000_000)
