"""Merge: what is known of a task, as a join: any order of arrival, any repetition, any split.

A task has one register for each type of event. A register keeps the event that is greatest by
(attempt, clock, time, hostname, pid, digest), a total order; the greatest of a set does not depend
on the order in which its members are seen, nor on how often. So a task's registers depend on the
set of its events alone, and two observers that heard the same have the same. Beside them grow two
more joins: the earliest time of each type, and the digests of deliveries and endings, so that
they can be counted although events are delivered twice. Both are written down only from the second
event of a type on; before, the register itself says it.

What a person reads is the view of the registers (`view.py`), made when it is asked for and never
merged. What is persisted is the registers, with their keys.

What it does not do: it cannot know what nobody heard. An attempt whose events were all lost is not
in it, and digests are counted up to `DIGESTS_MAX` for each type of one task.
"""

import msgspec

from umbel.events.digest import eid
from umbel.events.precedence import ENDINGS, rank
from umbel.events.types import (
    SLOTS,
    TaskCustom,
    TaskEvent,
    TaskFailed,
    TaskReceived,
    TaskRejected,
    TaskRetried,
    TaskRevoked,
    TaskSent,
    TaskStarted,
    TaskSucceeded,
)

DIGESTS_MAX = 1024
COUNTED = ENDINGS | {"received"}
"""The types whose events are counted: deliveries and endings."""


class Repeats(msgspec.Struct, gc=False):
    """What the registers forget of types that had more than one event."""

    first_us: dict[str, int]
    digests: dict[str, set[int]]


class Registers(msgspec.Struct, gc=False):
    """One task. Each register is empty or holds the greatest event of its type."""

    uuid: str
    sent: TaskSent | None = None
    received: TaskReceived | None = None
    started: TaskStarted | None = None
    succeeded: TaskSucceeded | None = None
    failed: TaskFailed | None = None
    retried: TaskRetried | None = None
    revoked: TaskRevoked | None = None
    rejected: TaskRejected | None = None
    custom: TaskCustom | None = None
    repeats: Repeats | None = None

    def held(self, slot: str) -> TaskEvent | None:
        event: TaskEvent | None = getattr(self, slot)
        return event

    def events(self) -> list[TaskEvent]:
        return [event for slot in SLOTS if (event := self.held(slot)) is not None]


def put(registers: Registers, event: TaskEvent) -> bool:
    """Join one event into the registers; whether that changed a register."""
    slot = event.slot
    held = getattr(registers, slot)
    if held is None:
        setattr(registers, slot, event)
        return True
    return _put_beside(registers, held, event)


def join(one: Registers, other: Registers) -> Registers:
    """What is known from both; neither is changed."""
    assert one.uuid == other.uuid, "only what is known of one task can be joined"
    both = Registers(one.uuid)
    for known in (one, other):
        absorb(both, known)
    return both


def absorb(registers: Registers, known: Registers) -> bool:
    """Join all that is known elsewhere into the registers; whether that changed a register."""
    changed = [put(registers, event) for event in known.events()]
    if known.repeats is not None:
        repeats = _repeats(registers)
        for slot, at_us in known.repeats.first_us.items():
            _note_first(repeats, slot, at_us)
        for slot, digests in known.repeats.digests.items():
            for digest in sorted(digests):
                _note_digest(repeats, slot, digest)
    return any(changed)


def is_later(one: TaskEvent, other: TaskEvent) -> bool:
    """Whether one comes after the other in the order of events, which is total."""
    mine, theirs = _prefix(one), _prefix(other)
    return mine > theirs if mine != theirs else eid(one) > eid(other)


def order_key(event: TaskEvent) -> tuple[int, int, int, str, int, int]:
    """The order of events as a key, for sorting them all."""
    return (*_prefix(event), eid(event))


def winner(registers: Registers) -> TaskEvent | None:
    """The event that says what state the task is in."""
    received = registers.received
    return max(registers.events(), key=lambda event: rank(event, received), default=None)


def first_us(registers: Registers, slot: str) -> int | None:
    """When an event of this type was first told."""
    repeats, held = registers.repeats, registers.held(slot)
    if repeats is not None and slot in repeats.first_us:
        return repeats.first_us[slot]
    return None if held is None else held.at_us


def count(registers: Registers, slot: str) -> int:
    """How many different events of this type were received, up to the limit."""
    assert slot in COUNTED
    repeats = registers.repeats
    if repeats is not None and slot in repeats.digests:
        return len(repeats.digests[slot])
    return 0 if registers.held(slot) is None else 1


def _put_beside(registers: Registers, held: TaskEvent, event: TaskEvent) -> bool:
    """Join an event whose register is taken."""
    if _prefix(held) == _prefix(event) and eid(held) == eid(event):
        return False
    slot = event.slot
    repeats = _repeats(registers)
    _note_first(repeats, slot, min(held.at_us, event.at_us))
    if slot in COUNTED:
        if slot not in repeats.digests:
            repeats.digests[slot] = {eid(held)}
        _note_digest(repeats, slot, eid(event))
    if not is_later(event, held):
        return False
    setattr(registers, slot, event)
    return True


def _repeats(registers: Registers) -> Repeats:
    if registers.repeats is None:
        registers.repeats = Repeats({}, {})
    return registers.repeats


def _note_first(repeats: Repeats, slot: str, at_us: int) -> None:
    repeats.first_us[slot] = min(at_us, repeats.first_us.get(slot, at_us))


def _note_digest(repeats: Repeats, slot: str, digest: int) -> None:
    digests = repeats.digests.setdefault(slot, set())
    if len(digests) < DIGESTS_MAX:
        digests.add(digest)


def _prefix(event: TaskEvent) -> tuple[int, int, int, str, int]:
    """What orders events before their digests are asked; hardly ever equal for two of them."""
    return (event.retries or 0, event.clock, event.at_us, event.hostname, event.pid)
