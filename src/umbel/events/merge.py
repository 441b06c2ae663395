"""Merge what is known of a task: the result does not depend on order, repetition or grouping of events.

A task has one register for each type of event. A register holds the event that is greatest by (attempt,
clock, time, hostname, pid, digest), a total order. The maximum is commutative, associative and idempotent, so
the merge (a join) is too: two observers that received the same events have the same registers. The digest
identifies an event by its content.

Two more joins accompany the registers: the earliest time of each type, and the digests of deliveries and
endings, so that these can be counted although events are delivered twice. Both are stored only from the
second event of a type on; before that, the register itself holds the information.

People read the view of the registers (`view.py`), which is computed on request and never merged. Only the
registers are stored. The timeline is the largest join: the set of all events, from which the registers can be
computed again.

Limits: events that were never received are unknown, so an attempt whose events were all lost is missing.
Digests are counted up to `DIGESTS_MAX` for each type of one task.
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
# A digest is a signed 64-bit number that identifies an event, the same for every receiver. It is computed
# from the event's record as JSON with sorted keys, without nulls and without the fields that receivers add.
# So a missing field equals a null field, and two times within one microsecond are equal.
#
# Digests are expensive, so they are computed only when they decide something: when two events are equal in
# everything that comes before the digest in the order, or when several events are counted. The chance that
# two of a million different events share a digest is about one in forty million.

_DIGEST_BYTES = 8
_NOT_DIGESTED = frozenset({"timestamp", "extra", "subject", "told_type"})


def eid(event: Event) -> int:
    """Return the event's digest, a signed 64-bit number."""
    digest = blake2b(_to_json(canonical(event)), digest_size=_DIGEST_BYTES).digest()
    return int.from_bytes(digest, "big", signed=True)


def canonical(event: Event) -> dict[str, Any]:
    """Return the event as a map of wire fields, with its time in microseconds."""
    fields = dict(event.extra or {})
    for name in event.__struct_fields__:
        value = getattr(event, name)
        if value is not None and name not in _NOT_DIGESTED:
            fields[name] = value
    return {**fields, "type": event.type_name, "timestamp": event.at_us}


_to_json = msgspec.json.Encoder(order="deterministic", enc_hook=str).encode


# ---- merge -----------------------------------------------------------------------------------------

DIGESTS_MAX = 1024
COUNTED = ENDINGS | {"received"}
"""The types whose events are counted: deliveries and endings."""


class Repeats(msgspec.Struct, gc=False):
    """What the registers cannot hold, for types with more than one event."""

    first_us: dict[str, int]
    digests: dict[str, set[int]]


class Registers(msgspec.Struct, gc=False):
    """The registers of one task. Each is empty or holds the greatest event of its type."""

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
    """Merge one event into the registers; return whether that changed a register."""
    slot = event.slot
    held = getattr(registers, slot)
    if held is None:
        setattr(registers, slot, event)
        return True
    return _put_beside(registers, held, event)


def join(first: Registers, other: Registers) -> Registers:
    """Return the merged registers; the arguments are not changed."""
    assert first.uuid == other.uuid, "registers of different tasks cannot be joined"
    both = Registers(first.uuid)
    for known in (first, other):
        absorb(both, known)
    return both


def absorb(registers: Registers, known: Registers) -> bool:
    """Merge other registers into the first; return whether that changed a register."""
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
    """Return whether the first event comes after the second; the order is total."""
    mine, theirs = _prefix(event), _prefix(other)
    return mine > theirs if mine != theirs else eid(event) > eid(other)


def order_key(event: TaskEvent) -> tuple[int, int, int, str, int, int]:
    """Return the sort key of an event."""
    return (*_prefix(event), eid(event))


def winner(registers: Registers) -> TaskEvent | None:
    """Return the event that decides the task's state; None if there are no events."""
    received = registers.received
    return max(registers.events(), key=lambda event: rank(event, received), default=None)


def first_us(registers: Registers, slot: str) -> int | None:
    """Return the earliest time of an event of this type; None if there is none."""
    repeats, held = registers.repeats, registers.held(slot)
    if repeats is not None and slot in repeats.first_us:
        return repeats.first_us[slot]
    return None if held is None else held.at_us


def count(registers: Registers, slot: str) -> int:
    """Return how many different events of this type were received, up to the limit."""
    assert slot in COUNTED
    repeats = registers.repeats
    if repeats is not None and slot in repeats.digests:
        return len(repeats.digests[slot])
    return 0 if registers.held(slot) is None else 1


def _put_beside(registers: Registers, held: TaskEvent, event: TaskEvent) -> bool:
    """Merge an event whose register is occupied."""
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
    """Return the part of the sort key before the digest; it is hardly ever equal for two events."""
    return (event.retries or 0, event.clock, event.at_us, event.hostname, event.pid)


# ---- timeline --------------------------------------------------------------------------------------
#
# The timeline holds all events of a task, each once, in merge order: by attempt, then by clock. It shows a
# task's history and checks the merge: registers computed from it must give the same view. The cluster's state
# does not store it, because it grows with every event. `task-sent` does not carry the cluster's clock, so it
# comes first in its attempt.


def timeline(events: Iterable[TaskEvent]) -> list[TaskEvent]:
    """Return these events in order, each once."""
    return [event for _, event in sorted({order_key(event): event for event in events}.items())]


def registers_of(uuid: str, events: Iterable[TaskEvent]) -> Registers:
    """Return the registers that these events of one task produce."""
    registers = Registers(uuid)
    for event in events:
        assert event.uuid == uuid, "a timeline holds events of one task"
        put(registers, event)
    return registers
