"""Mingle: what nodes tell one another in `hello`, and how it is taken in (S2).

A node that starts tells its name and what it knows to be revoked; every peer takes that in and
answers with what it knows and its clock. The form is Celery's, `{"revoked": [ids], "clock": n}`,
because a list of ids is what every version of it accepts; our nodes add the ages of the ids, and the
members they know, which Celery's pass over.

Stamps of other machines mean little here: clocks differ by hours, and older Celery sends the time
since its machine was started. So ages travel, and a stamp is judged by what it can be:

* one of the last three hours is a wall clock like ours;
* one that lies ahead, or is past its time although its owner still holds it, comes from a wall clock
  that is wrong, or is the uptime of another machine: it was set now.

"Now" is said once: the set never takes a later stamp for an id that it has, or had.

The answers move this node's clock past the highest among them; a clock beyond belief is passed over.
One bad entry never spoils the others.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from umbel.protocol.clock import LamportClock
from umbel.protocol.delivery.revoked import HEARSAY_MAX, HEARSAY_S, RevokedTasks

TASK_ID_MAX = 1000  # characters
TOLD_MAX = 10_000  # ids in one hello
TOLD_CHARACTERS_MAX = 400_000
INTRODUCED_MAX = 2_000
VERSION = 2


@dataclass(slots=True)
class Learned:
    """What one message brought: ids that were not known, entries that could not be read."""

    news: list[str] = field(default_factory=list)
    bad: int = 0


def hello(node: str, revoked: RevokedTasks, now: float) -> dict[str, Any]:
    """The arguments of the command."""
    return {"from_node": node, "cver": VERSION, **_told(revoked, now)}


def answer(
    revoked: RevokedTasks, clock: LamportClock, members: Sequence[list[Any]], now: float
) -> dict[str, Any]:
    """What a node says to one that starts; `members` only where that one understands them."""
    said: dict[str, Any] = {"clock": clock.forward(), **_told(revoked, now)}
    return said | {"members": list(members[:INTRODUCED_MAX])} if members else said


def take_in(said: Mapping[str, Any], revoked: RevokedTasks, now: float) -> Learned:
    """Merge the revoked ids of a hello, or of an answer to it."""
    ids, ages = said.get("revoked"), said.get("ages")
    learned = Learned()
    entries: Sequence[tuple[Any, Any]]
    if isinstance(ids, Mapping):
        entries = [(task_id, _age_of_stamp(stamp, now)) for task_id, stamp in ids.items()]
    elif isinstance(ids, list | tuple):
        if not isinstance(ages, list | tuple) or len(ages) != len(ids):
            ages = [0.0] * len(ids)
        entries = list(zip(ids, ages, strict=True))
    else:
        learned.bad += ids is not None
        return learned
    for task_id, age_s in entries[-HEARSAY_MAX:]:
        if not isinstance(task_id, str) or not 0 < len(task_id) <= TASK_ID_MAX or not _is_number(age_s):
            learned.bad += 1
        elif revoked.learn(task_id, age_s, now):
            learned.news.append(task_id)
    return learned


def adjust_clock(clock: LamportClock, answers: Mapping[str, Any]) -> None:
    """Step past the highest clock of all answers."""
    for said in answers.values():
        if isinstance(said, Mapping) and said.get("clock") is not None:
            clock.adjust(said["clock"])


def _told(revoked: RevokedTasks, now: float) -> dict[str, Any]:
    told = revoked.told(now, TOLD_MAX)
    room = TOLD_CHARACTERS_MAX
    kept: list[tuple[str, float]] = []
    for task_id, age_s in reversed(told):  # the newest first: they matter most
        room -= len(task_id)
        if room < 0:
            break
        kept.append((task_id, round(age_s, 3)))
    kept.reverse()
    return {"revoked": [task_id for task_id, _ in kept], "ages": [age_s for _, age_s in kept]}


def _age_of_stamp(stamp: Any, now: float) -> float | None:
    """How long ago that was, by our clock; None for what is no stamp."""
    if isinstance(stamp, list | tuple):
        stamp = stamp[0] if stamp else None
    if not _is_number(stamp):
        return None
    age_s = now - stamp
    return age_s if 0.0 <= age_s < HEARSAY_S else 0.0


def _is_number(value: Any) -> bool:
    return (type(value) is float or type(value) is int) and -1e18 < value < 1e18  # NaN is in no range
