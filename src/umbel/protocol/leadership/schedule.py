"""The schedule: which periodic tasks are due. Each slot of each task is sent once, whichever node leads.

A slot is a moment that a rule defines: every multiple of an interval since 1970, or the times of a cron
expression. Rules depend on time alone, so all nodes compute the same slots. Each entry has a mark: the last
slot that was sent or skipped. The marks are part of the lease that makes a node the leader. They change in
the same atomic step in which the messages are published, and only if the lease is still held. So no slot is
sent twice, whatever dies: a leader that was partitioned changes nothing, and the next leader continues at the
marks.

If a reply is lost, the leader does not know whether its slots were sent. It reads the marks again and
continues from them.

Limits: a broker that cannot publish and update the marks in one step (RabbitMQ) changes the marks when the
messages are confirmed. If a leader dies in between, the next one sends these slots again, under the same ids
and as redelivered. A slot is due by the leader's clock. Marks more than `AHEAD_MAX_S` ahead of it were set
with a wrong clock, and are dropped.
"""

from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from itertools import islice
from typing import Protocol

from umbel.protocol.leadership.coordination import Instant
from umbel.protocol.machine import Tick, Value

CATCH_UP_MAX = 1000
SEND_MAX = 1000
LATE_S = 2.0
"""A slot that is sent within this time does not count as missed, for entries with `CatchUp.NONE`."""
AHEAD_MAX_S = 3600.0
FORGET_AFTER_S = 7 * 86_400.0
RECHECK_S = 5.0
"""How often the leader checks again, in case the wall clock was set."""


class CatchUp(StrEnum):
    """What happens to slots that passed while no node was the leader."""

    NONE = "none"
    ONE = "one"  # send the last of them
    ALL = "all"  # send each of them, at most the last `CATCH_UP_MAX`


class Rule(Protocol):
    """Defines which moments are slots, in microseconds since 1970."""

    def after(self, at_us: int) -> int:
        """Return the first slot after this moment."""
        ...

    def until(self, at_us: int) -> int:
        """Return the last slot that is not after this moment."""
        ...


class Every(Value):
    """Each multiple of an interval since 1970: the same slots on every node and after any restart."""

    interval_us: int

    def after(self, at_us: int) -> int:
        """Return the first slot after this moment."""
        return (at_us // self.interval_us + 1) * self.interval_us

    def until(self, at_us: int) -> int:
        """Return the last slot that is not after this moment."""
        return at_us // self.interval_us * self.interval_us


class Entry(Value):
    """A periodic task: its name, its rule, and what happens to missed slots."""

    name: str
    rule: Rule
    catch_up: CatchUp = CatchUp.ONE


class Slot(Value):
    """One moment at which an entry is sent."""

    name: str
    at_us: int


# ---- events ----------------------------------------------------------------------------------------


class Lead(Value):
    """This node leads, and the previous leader stored these marks."""

    marks: Mapping[str, int]


class Follow(Value):
    """This node no longer leads."""


class SlotsSent(Value):
    """The last effect was performed."""


class Unsure(Value):
    """It is unknown whether the last effect was performed."""


class SlotsRefused(Value):
    """The last effect was not performed: another node leads."""


class MarksRead(Value):
    """The marks in the store."""

    marks: Mapping[str, int]


class PausesRead(Value):
    """The paused entries; valid until the next such event."""

    names: frozenset[str]


# ---- effects ---------------------------------------------------------------------------------------


class SendSlots(Value):
    """Publish these slots and store the marks, in one step; answer with Sent, Unsure or Refused."""

    slots: tuple[Slot, ...]
    marks: Mapping[str, int]


class ReadMarks(Value):
    """Read the marks; answer with MarksRead or Unsure."""


class ReadPauses(Value):
    """Read the paused entries, before a new leader sends anything; answer with PausesRead or Follow."""


class Missed(Value):
    """`count` slots of this entry were skipped, at most CATCH_UP_MAX + 1."""

    name: str
    count: int
    last_us: int


Event = Lead | Follow | SlotsSent | Unsure | SlotsRefused | MarksRead | PausesRead
Effect = SendSlots | ReadMarks | ReadPauses | Missed


class Schedule:
    """The schedule of one node; it sends while the node leads."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        self.leads = False
        self.deadline: float | None = None
        self._entries = {entry.name: entry for entry in entries}
        self._marks: dict[str, int] = {}
        self._paused: frozenset[str] = frozenset()
        self._left: Mapping[str, int] | None = None  # the previous leader's marks, until they are applied
        self._asked: SendSlots | None = None  # the effect that has no reply yet

    def step(self, event: Event | Tick, now: Instant) -> list[Effect]:
        """Process one event; return what to send or read."""
        effects = self._decide(event, now)
        self.deadline = self._next_s(now) if self._is_free else None
        return effects

    @property
    def _is_free(self) -> bool:
        """Return whether this node leads and waits only for time to pass."""
        return self.leads and self._left is None and self._asked is None

    def _decide(self, event: Event | Tick, now: Instant) -> list[Effect]:
        match event:
            case Lead(marks):
                self.leads, self._left, self._asked = True, marks, None
                return [ReadPauses()]
            case Follow():  # the reply to the last effect has not arrived
                self.leads, self._left = False, None
            case SlotsRefused():
                self.leads, self._left, self._asked = False, None, None
            case PausesRead(names):
                self._paused = names
                if self._left is not None:
                    left, self._left = self._left, None
                    return self._take_up(left, now)
            case SlotsSent() if self._asked is not None:
                self._marks, self._asked = dict(self._asked.marks), None
                return self._look(now) if self.leads else []
            case Unsure() if self._asked is not None:
                if self.leads:
                    return [ReadMarks()]
                self._asked = None
            case MarksRead(marks) if self._asked is not None:
                self._asked = None
                return self._take_up(marks, now) if self.leads else []
            case Tick() if self._is_free:
                return self._look(now)
        return []

    def _take_up(self, marks: Mapping[str, int], now: Instant) -> list[Effect]:
        """Continue from these marks; an entry without a mark starts now."""
        now_us = _us(now)
        ahead_us, old_us = now_us + int(AHEAD_MAX_S * 1e6), now_us - int(FORGET_AFTER_S * 1e6)
        believed = {
            name: mark
            for name, mark in marks.items()
            if mark <= ahead_us and (name in self._entries or mark > old_us)
        }
        self._marks = {**dict.fromkeys(self._entries, now_us), **believed}
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
                break  # the rest follows after this has been sent
            marks[entry.name] = newest
            slots += due
            if missed:
                effects.append(Missed(entry.name, missed, newest))
        if slots or effects:
            effects.append(self._ask(tuple(slots), marks))
        return effects

    def _due(self, entry: Entry, newest: int, now_us: int) -> tuple[list[Slot], int]:
        """Return the slots of an entry to send, oldest first, and how many are skipped."""
        passed = list(islice(_back(entry.rule, newest, self._marks[entry.name]), CATCH_UP_MAX + 1))
        if entry.catch_up is CatchUp.ALL:
            sent = passed[:CATCH_UP_MAX]
        elif entry.catch_up is CatchUp.ONE or newest >= now_us - int(LATE_S * 1e6):
            sent = passed[:1]
        else:
            sent = []
        return [Slot(entry.name, at_us) for at_us in reversed(sent)], len(passed) - len(sent)

    def _ask(self, slots: tuple[Slot, ...], marks: Mapping[str, int]) -> SendSlots:
        self._asked = SendSlots(slots, dict(marks))
        return self._asked

    def _next_s(self, now: Instant) -> float:
        now_us = _us(now)
        wait_us = min(
            (max(0, entry.rule.after(self._marks[entry.name]) - now_us) for entry in self._entries.values()),
            default=int(RECHECK_S * 1e6),
        )
        return now.boot_s + min(wait_us / 1e6, RECHECK_S)


def _back(rule: Rule, newest: int, mark: int) -> Iterator[int]:
    """Yield the slots after the mark, newest first."""
    at_us = newest
    while at_us > mark:
        yield at_us
        at_us = rule.until(at_us - 1)


def _us(now: Instant) -> int:
    return int(now.wall_s * 1_000_000)
