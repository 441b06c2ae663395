"""Every course of one election on two nodes: with one crash, one loss, one duplicate, two expiries.

Chance finds what is likely; this finds what is possible. The real machine and the real decisions of
the store are taken through every order in which messages can arrive, be lost or come twice, timers
fire, a node die and come back, and the holder's time run out. Each state is looked at once.

What makes the states finite without leaving out what matters:

- Time stands still except when the holder's time runs out: then it jumps beyond it, and beyond every
  deadline that was counted before. A turn to claim may come at any moment, so a pause and a slow
  clock are turns that come late.
- A call has one answer or none, as with a connection and a time-out: it is made again when it or
  its answer was lost. Making it again although it is only late is what the one duplicate stands
  for, which may be of any call at any time.
- A broadcast arrives at once or never: it only makes a node wait, or stop.
- When the store has closed the election and no yes to a start is on its way, nothing can run.
- A watcher asks when the holder's time is over, a handler renews when that would change something,
  a node does not hear its own broadcasts, and tombstones outlive every message: otherwise nothing
  would happen that these states do not show.
"""

from collections.abc import Callable
from dataclasses import dataclass

from tests.sim.courses import Budget, Courses, State
from umbel.protocol.election.election import Elections
from umbel.protocol.leadership.coordination import CLOSED_STATES, Policy

STATES_MAX = 20_000_000
NUMBER_BITS = 16


@dataclass(frozen=True, slots=True)
class Explored:
    policy: Policy
    states: int
    endings: int  # states in which the store has closed the election
    complete: bool
    violation: str | None


def explore(
    policy: Policy,
    budget: Budget | None = None,
    *,
    machine: Callable[..., Elections] = Elections,
    states_max: int = STATES_MAX,
) -> Explored:
    """First without anything going wrong, then with what the budget allows, least of it first.

    What can happen with little left to go wrong can happen with more left: a state that was seen
    with at least as much left needs no second look.
    """
    courses = Courses(policy, budget or Budget(), machine)
    first = courses.first()
    spending: list[list[State]] = [[first], *([] for _ in range(sum(first.budget)))]
    seen: dict[object, list[tuple[int, int, int]]] = {}
    states = endings = 0
    for spent, waiting in enumerate(spending):
        while waiting and courses.violation is None and states <= states_max:
            state = waiting.pop()
            left = state.budget
            key = _packed(state)
            known = seen.get(key)
            if known is None:
                seen[key] = [left]
            elif any(_covers(more, left) for more in known):
                continue
            else:
                known.append(left)
            states += 1
            endings += courses.record(state.record).state in CLOSED_STATES
            whole = sum(left)
            for following in courses.successors(state):
                known = seen.get(_packed(following))
                if known is None or not any(_covers(more, following.budget) for more in known):
                    spending[spent + whole - sum(following.budget)].append(following)
    complete = not any(spending)
    assert courses.numbers < 2**NUMBER_BITS, "a number stands for one thing"
    return Explored(policy, states, endings, complete, courses.violation)


def _packed(state: State) -> int:
    """A state without its budget as one number, which is all that is kept of it."""
    packed = (state.last_run << 4 | state.jumps) << NUMBER_BITS | state.record
    for number in (*state.nodes, *state.messages):
        packed = packed << NUMBER_BITS | number
    return packed << 4 | len(state.messages)


def _covers(more: tuple[int, int, int], less: tuple[int, int, int]) -> bool:
    return more[0] >= less[0] and more[1] >= less[1] and more[2] >= less[2]
