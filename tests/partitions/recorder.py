"""Recorder: writes down what the machines of a real worker were told and what they decided.

It stands between a worker and its machines for leases, elections and membership. A record is made of the
events and effects themselves, which is what the checkers of the simulator know; `replay.py` reads them.
"""

import os
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from umbel.coordination import driver
from umbel.protocol.leadership.coordination import Instant
from umbel.protocol.leadership.lease import Role
from umbel.protocol.machine import Tick
from umbel.protocol.membership.members import Joined, Left, Lost, MemberState
from umbel.worker.steps import elections, gossip

holders: list[str] = []  # under which name this process takes part in elections
PRESENT = {MemberState.ALIVE, MemberState.SUSPECT}


@dataclass(frozen=True, slots=True)
class Record:
    """`name` is that of a lease. `view`: until when it leads and under which term; or who is a member."""

    at: Instant
    who: str
    machine: str
    name: str
    event: Any
    effects: tuple[Any, ...]
    view: Any = None


def record_machines(directory: Path) -> None:
    """From now on, in this process."""
    file = os.open(directory / f"{os.getpid()}.records", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def write(record: Record) -> None:
        os.write(file, pickle.dumps(record))

    _watch(vars(driver)["Lease"], _lease_record, write)
    _watch(vars(elections)["Elections"], _election_record, write)
    _watch(vars(gossip)["Membership"], _member_record, write)


def read_records(directory: Path) -> Iterator[Record]:
    """Process by process, each in the order of time."""
    for path in sorted(directory.glob("*.records")):
        with path.open("rb") as file:
            while file.peek(1):
                yield pickle.load(file)


def _watch(kind: Any, describe: Callable[..., Record | None], write: Callable[[Record], None]) -> None:
    step = kind.step

    def watched(self: Any, event: Any, now: Instant) -> Any:
        effects = step(self, event, now)
        record = describe(self, event, tuple(effects), now)
        if record is not None:
            write(record)
        return effects

    kind.step = watched


def _lease_record(lease: Any, event: Any, effects: tuple[Any, ...], now: Instant) -> Record | None:
    if isinstance(event, Tick) and not effects:
        return None
    leads = (lease.term, lease.give_up_s) if lease.role is Role.LEADER else None
    return Record(now, lease._holder, "lease", lease.name, event, effects, leads)


def _election_record(elections: Any, event: Any, effects: tuple[Any, ...], now: Instant) -> Record | None:
    holders[:] = [elections._holder]
    if isinstance(event, Tick) and not effects:
        return None
    return Record(now, elections._holder, "elections", "", event, effects)


def _member_record(members: Any, event: Any, effects: tuple[Any, ...], now: Instant) -> Record | None:
    changes = tuple(one for one in effects if isinstance(one, Joined | Left | Lost))
    if not changes:
        return None
    inc, pid = members._run
    there = frozenset(one.holder for one in members.members() if one.state in PRESENT)
    return Record(now, f"{members._node}.{pid}.{inc}", "membership", "", None, changes, there)
