"""Timeline: all events of a task, each once, in the order of the merge.

It is the largest of the joins: the set of events itself. What the registers keep can be made from
it again, and the view of those must be the same, which the tests hold. It is for showing a task's
story and for checking; the cluster's state does not keep it, because it grows with every event.

In a task's order the attempt comes first, then the clock. `task-sent` has no clock of the cluster's,
so it comes first in its attempt.
"""

from collections.abc import Iterable

from umbel.events.merge import Registers, order_key, put
from umbel.events.types import TaskEvent


def timeline(events: Iterable[TaskEvent]) -> list[TaskEvent]:
    """The different ones of these events, in order."""
    return [event for _, event in sorted({order_key(event): event for event in events}.items())]


def registers_of(uuid: str, events: Iterable[TaskEvent]) -> Registers:
    """What the cluster's state would know from these events of one task."""
    registers = Registers(uuid)
    for event in events:
        assert event.uuid == uuid, "a timeline is one task's"
        put(registers, event)
    return registers
