"""Judging: what a soak promised, from journals, the schedule of its partitions and who saw whom lost."""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from tests.partitions.schedule import Disturbance, Kind
from umbel.app.cluster.periodic import slot_id

ABSENT = {"lost", "left"}
# From the last heartbeat to the loss, in heartbeats: twice eight of silence where this machine is slow,
# six of suspicion, and six more where most seem silent.
SEEN_BEATS = 28
DEAF_S = 10.0  # until who hears nothing has noticed that, and says nothing any more


def runs_of(journal: Path) -> dict[str, list[bool]]:
    """By task: for each of its runs, in order, whether it knew that it was a repetition."""
    runs: dict[str, list[bool]] = defaultdict(list)
    if journal.exists():
        for line in journal.read_text().splitlines():
            task_id, redelivered, _at = line.split()
            runs[task_id].append(redelivered == "1")
    return dict(runs)


def lost(sent: Collection[str], runs: Mapping[str, Sequence[bool]]) -> list[str]:
    return sorted(set(sent) - set(runs))


def sent_twice(runs: Mapping[str, Sequence[bool]]) -> list[str]:
    """Tasks of which more than one run took itself for the first."""
    return sorted(task_id for task_id, flags in runs.items() if len(flags) - sum(flags) > 1)


def left_out(slots: Collection[str], began_s: int, ends_s: int) -> list[int]:
    """Seconds without their periodic task, between the first and the last that had it."""
    numbers = {slot_id("beat", one * 1_000_000): one for one in range(began_s, ends_s)}
    unknown = set(slots) - set(numbers)
    assert not unknown, f"no slots: {unknown}"
    found = {numbers[one] for one in slots}
    return sorted(set(range(min(found), max(found) + 1)) - found)


def must_be_seen(one: Disturbance, heartbeat_s: float) -> bool:
    """Whether it takes so long that others have to notice."""
    match one.kind:
        case Kind.BOTH | Kind.OUT:
            return one.lasts_s >= SEEN_BEATS * heartbeat_s
        case Kind.IN:
            return one.lasts_s >= SEEN_BEATS * heartbeat_s + DEAF_S
        case _:
            return False


def was_seen(one: Disturbance, seen: Sequence[tuple[float, str, str]]) -> bool:
    """Whether the place was lost at any time of it; times are those of the schedule."""
    states = [(at_s, what) for at_s, place, what in seen if place == one.place]
    before = [what for at_s, what in states if at_s <= one.at_s]
    during = [what for at_s, what in states if one.at_s < at_s <= one.ends_s + 1.0]
    return any(what in ABSENT for what in [*before[-1:], *during])


def not_taken_back(places: Collection[str], seen: Sequence[tuple[float, str, str]]) -> list[str]:
    last = {place: what for _, place, what in seen}
    return sorted(place for place in places if last.get(place, "lost") in ABSENT)


def is_disturbed(schedule: Sequence[Disturbance], place: str, at_s: float, *, within_s: float) -> bool:
    """Whether anything was wrong with the place's network in the time before."""
    return any(one.place == place and one.at_s <= at_s <= one.ends_s + within_s for one in schedule)
