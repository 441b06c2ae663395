"""Merge: what is known of a task, as a join: any order of arrival, any repetition, any split.

A task has one register for each type of event. A register holds the event that is greatest by (attempt,
clock, time, hostname, pid, digest), a total order; the maximum is commutative, associative and idempotent, so
the join is too. The digest identifies an event by its content. The timeline is the largest join: the set of
all events, from which the registers can be computed again.
"""

from collections.abc import Iterable
from hashlib import blake2b
from typing import Any

import msgspec

from umbel.events.precedence import ENDINGS, rank
from umbel.events.types import (
    SLOTS,
    Event,
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

# ---- digest ----------------------------------------------------------------------------------------
#
# 64 bits that identify an event, the same for every receiver.
#
# It is taken over the canonical event: its record written as JSON with sorted keys, without nulls and
# without what receivers add. So a missing field and a null field are the same, and so are two times within
# one microsecond. The number is signed, as the pipeline's tables hold it.
#
# An event is digested only when that decides something: when everything before it in the order is equal, or
# when events are counted and there are several. The chance that two of a million different events share a
# digest is about one in forty million.

_DIGEST_BYTES = 8
_NOT_DIGESTED = frozenset({"timestamp", "extra", "subject", "told_type"})


def eid(event: Event) -> int:
    """Return the event's digest, a signed 64-bit number."""
    digest = blake2b(_to_json(canonical(event)), digest_size=_DIGEST_BYTES).digest()
    return int.from_bytes(digest, "big", signed=True)


def canonical(event: Event) -> dict[str, Any]:
    """Return the event as a map of the wire, with its time in microseconds."""
    fields = dict(event.extra or {})
    for name in event.__struct_fields__:
        value = getattr(event, name)
        if value is not None and name not in _NOT_DIGESTED:
            fields[name] = value
    return {**fields, "type": event.type_name, "timestamp": event.at_us}


_to_json = msgspec.json.Encoder(order="deterministic", enc_hook=str).encode


# ---- merge -----------------------------------------------------------------------------------------
#
# What is known of a task, as a join: any order of arrival, any repetition, any split.
#
# A task has one register for each type of event. A register holds the event that is greatest by (attempt,
# clock, time, hostname, pid, digest), a total order; the greatest of a set does not depend on the order in
# which its members are seen, nor on how often. So a task's registers depend on the set of its events alone,
# and two observers that received the same events have the same registers. Two more joins accompany them:
# the earliest time of each type, and the digests of deliveries and endings, so that these can be counted
# although events are delivered twice. Both are stored only from the second event of a type on; before, the
# register itself holds the information.
#
# What a person reads is the view of the registers (`view.py`), made on request and never merged. What is
# persisted is the registers, with their keys.
#
# What it does not do: it cannot know events that were never received. An attempt whose events were all lost
# is not in it, and digests are counted up to `DIGESTS_MAX` for each type of one task.

DIGESTS_MAX = 1024
COUNTED = ENDINGS | {"received"}
"""The types whose events are counted: deliveries and endings."""


class Repeats(msgspec.Struct, gc=False):
    """What the registers do not hold, of types that had more than one event."""

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
        """Return the event in a register; None if it is empty."""
        event: TaskEvent | None = getattr(self, slot)
        return event

    def events(self) -> list[TaskEvent]:
        """Return the events in all registers."""
        return [event for slot in SLOTS if (event := self.held(slot)) is not None]


def put(registers: Registers, event: TaskEvent) -> bool:
    """Join one event into the registers; return whether that changed a register."""
    slot = event.slot
    held = getattr(registers, slot)
    if held is None:
        setattr(registers, slot, event)
        return True
    return _put_beside(registers, held, event)


def join(first: Registers, other: Registers) -> Registers:
    """Return the join of both; neither is changed."""
    assert first.uuid == other.uuid, "only what is known of one task can be joined"
    both = Registers(first.uuid)
    for known in (first, other):
        absorb(both, known)
    return both


def absorb(registers: Registers, known: Registers) -> bool:
    """Join the contents of other registers; return whether that changed a register."""
    changed = [put(registers, event) for event in known.events()]
    if known.repeats is not None:
        repeats = _repeats(registers)
        for slot, at_us in known.repeats.first_us.items():
            _note_first(repeats, slot, at_us)
        for slot, digests in known.repeats.digests.items():
            for digest in sorted(digests):
                _note_digest(repeats, slot, digest)
    return any(changed)


def is_later(event: TaskEvent, other: TaskEvent) -> bool:
    """Whether the first event comes after the second in the order of events, which is total."""
    mine, theirs = _prefix(event), _prefix(other)
    return mine > theirs if mine != theirs else eid(event) > eid(other)


def order_key(event: TaskEvent) -> tuple[int, int, int, str, int, int]:
    """Return the order of events as a key, for sorting."""
    return (*_prefix(event), eid(event))


def winner(registers: Registers) -> TaskEvent | None:
    """Return the event that decides the task's state; None without any event."""
    received = registers.received
    return max(registers.events(), key=lambda event: rank(event, received), default=None)


def first_us(registers: Registers, slot: str) -> int | None:
    """Return the earliest time of an event of this type; None without any."""
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
    """Join an event whose register is occupied."""
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
    """The order of events before their digests are compared; hardly ever equal for two of them."""
    return (event.retries or 0, event.clock, event.at_us, event.hostname, event.pid)


# ---- timeline --------------------------------------------------------------------------------------
#
# All events of a task, each once, in the order of the merge.
#
# It is the largest of the joins: the set of events itself. The registers can be computed from it, and their
# view must be the same, which the tests check. It is for showing a task's history and for checking; the
# cluster's state does not store it, because it grows with every event.
#
# In a task's order the attempt comes first, then the clock. `task-sent` does not carry the cluster's clock,
# so it comes first in its attempt.


def timeline(events: Iterable[TaskEvent]) -> list[TaskEvent]:
    """Return these events in order, each once."""
    return [event for _, event in sorted({order_key(event): event for event in events}.items())]


def registers_of(uuid: str, events: Iterable[TaskEvent]) -> Registers:
    """Return what the cluster's state would know from these events of one task."""
    registers = Registers(uuid)
    for event in events:
        assert event.uuid == uuid, "a timeline is one task's"
        put(registers, event)
    return registers
