"""Timetable: the app's periodic tasks: when each was last sent, is next due, and whether it is paused.

The times of the last runs are data of the leader's lease; pauses have a separate lease.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from time import time
from typing import Any

from umbel.app.app import App
from umbel.app.cluster.periodic import Periodic
from umbel.app.sending.preparation import new_id
from umbel.brokers.interface import ClusterRecord
from umbel.protocol.leadership.coordination import LeaseReply
from umbel.wire.records import decode_marks, decode_pauses, encode_pauses
from umbel.worker.steps.scheduler import PAUSES_LEASE, SCHEDULER_LEASE

CHANGE_TTL_S = 5.0
CHANGE_TRIES = 50
TRY_AGAIN_S = 0.1
MISSED_MAX = 1000
LATE_US = 5_000_000  # a slot that was not sent this long after its time is missed
Names = frozenset[str]


@dataclass(frozen=True, slots=True)
class PeriodicState:
    """A periodic task of the app. `mark`: its last settled slot, in microseconds, in the leader's record."""

    periodic: "Periodic"
    mark: int | None
    paused: bool
    now_us: int

    @property
    def last_us(self) -> int | None:
        """The slot that was last sent; None if there was none."""
        # For a new task the leader records the moment it was first seen, which is no slot.
        is_slot = self.mark is not None and self.periodic.entry.rule.until(self.mark) == self.mark
        return self.mark if is_slot else None

    @property
    def next_us(self) -> int:
        """The next slot, in microseconds of Unix time."""
        return self.periodic.entry.rule.after(max(self.now_us, self.mark or 0))

    @property
    def missed(self) -> int:
        """How many slots are past since the last settled slot; counted up to MISSED_MAX."""
        if self.mark is None or self.paused:
            return 0
        slot, count = self.mark, 0
        while count < MISSED_MAX and (slot := self.periodic.entry.rule.after(slot)) < self.now_us - LATE_US:
            count += 1
        return count

    def as_data(self) -> dict[str, Any]:
        """The row for `--json` and the dashboard."""
        return {
            "name": self.periodic.name,
            "task": self.periodic.signature.task,
            "rule": self.periodic.rule_text,
            "catch_up": str(self.periodic.entry.catch_up),
            "last": None if self.last_us is None else _iso(self.last_us),
            "next": None if self.paused else _iso(self.next_us),
            "paused": "yes" if self.paused else "",
        }


async def read_timetable(app: App, broker: ClusterRecord) -> tuple[LeaseReply, list[PeriodicState]]:
    """Return the leader's lease, and every periodic task of the app."""
    store = broker.coordination
    lease, pauses = await store.read_lease(SCHEDULER_LEASE), await store.read_lease(PAUSES_LEASE)
    marks, paused = decode_marks(lease.data), decode_pauses(pauses.data)
    now_us = int(time() * 1_000_000)
    found = [
        PeriodicState(task, marks.get(task.name), task.name in paused, now_us) for task in app.periodic_tasks
    ]
    return lease, found


def leader_of(lease: LeaseReply) -> str:
    """Return the name of the node that holds the lease."""
    return lease.holder.rsplit(".", 2)[0]  # without process and incarnation


async def change_pauses(broker: ClusterRecord, edit: Callable[[Names], Names]) -> bool:
    """Edit the pauses under their lease, so that no concurrent change is lost; return whether that worked."""
    store, holder = broker.coordination, f"cli.{new_id()}"
    for _ in range(CHANGE_TRIES):
        taken = await store.acquire_lease(PAUSES_LEASE, holder, ttl_s=CHANGE_TTL_S)
        if taken.granted:
            wanted = encode_pauses(edit(decode_pauses(taken.data)))
            changed = await store.update_lease(PAUSES_LEASE, holder, taken.term, wanted)
            await store.release_lease(PAUSES_LEASE, holder, taken.term)
            return changed
        await asyncio.sleep(TRY_AGAIN_S)
    return False


def _iso(at_us: int) -> str:
    return datetime.fromtimestamp(at_us / 1_000_000, UTC).isoformat(timespec="seconds")
