"""Rules: what brokers that record claims themselves decide alike. Pure: the caller reads and writes.

Which messages a claim takes. Priority decides first, over all queues of the claim. Within a priority every
queue that has messages gets an equal share, so a full queue never starves another. Within a queue the oldest
message is first. The queues take turns: the next claim begins after the queue that was served last.

How claims end. A verdict names its claim by a tag. It is applied only while that very claim stands.
Otherwise it is a conflict, and neither its results nor its follow-ups are stored. Of the verdicts of a batch
that end a claim, only the first is applied.
"""

from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import assert_never

from msgspec.structs import replace

from umbel.brokers.interface import Ack, Bury, Depth, Return, Started, Tag, Verdict
from umbel.wire.message import Outgoing, StoredResult

LOST_CHECKS_PER_LEASE = 3
"""How often a worker looks for owners whose lease has ended, while it claims."""


# ---- turns and shares ------------------------------------------------------------------------------


def in_turn(queues: Iterable[str], last: str) -> list[str]:
    """The queues, each once, beginning after the one that was served last."""
    names = list(dict.fromkeys(queues))
    if last in names:
        turn = names.index(last) + 1
        names = names[turn:] + names[:turn]
    return names


@dataclass(frozen=True, slots=True)
class Heap:
    """Messages of one queue and one priority, oldest first."""

    queue: str
    priority: int
    ids: Sequence[int]


def share(heaps: Iterable[Heap], limit: int, queues: Sequence[str]) -> list[Heap]:
    """What a claim takes: the front of each heap, at most `limit` messages in all.

    `queues` are in the order of their turns; the last heap of the result had the last turn.
    """
    by_priority: dict[int, list[Heap]] = {}
    for heap in sorted(heaps, key=lambda heap: queues.index(heap.queue)):
        by_priority.setdefault(heap.priority, []).append(heap)
    taken: list[Heap] = []
    for _, peers in sorted(by_priority.items()):
        counts, last = [0] * len(peers), 0
        while limit and any(count < len(heap.ids) for count, heap in zip(counts, peers, strict=True)):
            for place, heap in enumerate(peers):
                if limit and counts[place] < len(heap.ids):
                    counts[place] += 1
                    limit -= 1
                    last = place
        order = [*range(last + 1, len(peers)), *range(last + 1)]
        taken += [
            Heap(peers[place].queue, peers[place].priority, peers[place].ids[: counts[place]])
            for place in order
            if counts[place]
        ]
    return taken


# ---- verdicts --------------------------------------------------------------------------------------


@dataclass(slots=True)
class Judgement:
    """A batch of verdicts sorted by what must be done, with the ids of the messages."""

    conflicts: set[Tag] = field(default_factory=set)
    finished: list[int] = field(default_factory=list)
    returned: list[tuple[int, Return]] = field(default_factory=list)
    buried: list[tuple[int, Bury]] = field(default_factory=list)
    kept: dict[int, str] = field(default_factory=dict)  # failures to retain, with their reasons
    started: list[int] = field(default_factory=list)
    results: list[StoredResult] = field(default_factory=list)
    follow_ups: list[Outgoing] = field(default_factory=list)
    applied: int = 0


def sort_verdicts(verdicts: Sequence[Verdict], standing: dict[Tag, int]) -> Judgement:
    """Sort the verdicts, given the claims that stand and the ids of their messages.

    A verdict that ends a claim removes it from `standing`, so that a second one is a conflict.
    """
    judged = Judgement()
    for verdict in verdicts:
        number = standing.get(verdict.tag)
        if number is None:
            judged.conflicts.add(verdict.tag)
            continue
        judged.applied += 1
        if isinstance(verdict, Started):
            judged.started.append(number)
            continue
        del standing[verdict.tag]
        match verdict:
            case Ack():
                judged.finished.append(number)
                if verdict.keep:
                    judged.kept[number] = verdict.keep
            case Return():
                judged.returned.append((number, verdict))
                continue
            case Bury():
                judged.buried.append((number, verdict))
            case _:
                assert_never(verdict)
        judged.results.extend(verdict.results)
        judged.follow_ups.extend(verdict.follow_ups)
    return judged


class HeldByClaims:
    """What claims of this process hold besides their messages, by tag.

    `marks`: the signatures that they have used. `slots`: the buckets of task limits in which
    they hold a slot.
    """

    def __init__(self) -> None:
        self.marks: dict[Tag, str] = {}
        self.slots: dict[Tag, str] = {}

    def marks_ended(self, verdicts: Iterable[Verdict], conflicts: Container[Tag] = ()) -> list[str]:
        """The signatures of the messages that these verdicts end."""
        return [
            self.marks[verdict.tag]
            for verdict in verdicts
            if isinstance(verdict, Ack | Bury) and verdict.tag in self.marks and verdict.tag not in conflicts
        ]

    def slots_ended(self, verdicts: Iterable[Verdict], conflicts: Container[Tag] = ()) -> dict[Tag, str]:
        """The slots of the claims that these verdicts end."""
        return {
            verdict.tag: self.slots[verdict.tag]
            for verdict in verdicts
            if not isinstance(verdict, Started) and verdict.tag in self.slots and verdict.tag not in conflicts
        }

    def forget(self, tags: Iterable[Tag]) -> None:
        """Forget what these claims hold."""
        if self.marks or self.slots:  # usually there are no signatures and no limits
            for tag in tags:
                self.marks.pop(tag, None)
                self.slots.pop(tag, None)


# ---- limits, dead letters and pauses ---------------------------------------------------------------

AHEAD_S, AHEAD_MAX = 1.0, 100  # in a bucket with a pace, so many messages are called before they are due
PASSED_OVER_MAX = 1000  # messages of paused queues that are returned at once; the next call continues
DEAD_LETTERS_MAX = 100_000


def room_of(most: int, interval_s: float) -> int:
    """How many messages of a bucket may run or be called at once: `most`, or as its pace allows."""
    return most or max(1, min(AHEAD_MAX, int(AHEAD_S / interval_s)))


def with_pauses(depths: Mapping[str, Depth], paused: Collection[str]) -> dict[str, Depth]:
    """The depths of all queues that hold a message or are paused, sorted by name, with the pauses set."""
    found = {name: replace(depth, paused=name in paused) for name, depth in depths.items()}
    found |= {name: Depth(0, 0, 0, paused=True) for name in paused if name not in found}
    return dict(sorted(found.items()))
