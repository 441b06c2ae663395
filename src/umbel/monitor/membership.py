"""Who is there: the membership machine of the workers, run by one who only listens.

It hears what the nodes hear and judges as they do, so a monitor needs no running Umbel worker, and Celery's
nodes are judged too. Unlike a worker it announces nothing. `known_members` asks the workers instead.
"""

import asyncio
import os
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Annotated, Any, Literal, Protocol

import msgspec

from umbel.brokers.interface import ClusterRecord, FanOut
from umbel.chance import uniform
from umbel.control.client import Asker
from umbel.coordination.driver import drive
from umbel.coordination.inquiries import Inquiries
from umbel.protocol.membership.events import (
    Cleared,
    Effect,
    Event,
    Introduced,
    Joined,
    Left,
    Lost,
    Member,
    Probe,
    Suspected,
)
from umbel.protocol.membership.gossip import Membership
from umbel.protocol.membership.opinions import HEARTBEAT_S, Opinion, is_better
from umbel.wire.gossip import read_worker_event

INBOX_MAX = 10_000
Rows = list[dict[str, Any]]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=100_000_000_000)]


class ClusterBroker(FanOut, ClusterRecord, Protocol):
    """What is asked about the cluster: its nodes, and the store that they share."""


class MembershipWatch:
    """`changed(what, member, by)` is called for each change: joined, returned, suspect, alive, left, lost."""

    def __init__(
        self, broker: ClusterBroker, asker: Asker, changed: Callable[[str, Member, str], None]
    ) -> None:
        self._inquiries = Inquiries(asker, broker, self._tell)
        self._changed = changed
        pid = os.getpid()
        self._machine = Membership(f"gen{pid}@{socket.gethostname()}", 1, pid, uniform)
        self._inbox: asyncio.Queue[Event] = asyncio.Queue(maxsize=INBOX_MAX)
        self._group = asyncio.TaskGroup()

    @property
    def members(self) -> tuple[Member, ...]:
        return self._machine.members()

    async def run(self) -> None:
        """Until cancelled."""
        async with self._group:
            await drive(self._machine, self._inbox, self._perform)

    async def introduce(self, rows: Rows) -> None:
        """The nodes that were there before we listened, as `known_members` found them."""
        for row in rows:
            if row["state"] in ("alive", "suspect") and row.get("pid"):
                run = (row["incarnation"], row["pid"])
                told = Introduced(row["node"], *run, row["clock"], row["freq_s"], row["software"])
                await self._inbox.put(told)

    async def take(self, event: Mapping[str, Any]) -> None:
        for told in read_worker_event(event):
            await self._inbox.put(told)

    async def _perform(self, effect: Effect) -> None:
        match effect:
            case Joined(member, returned):
                self._changed("returned" if returned else "joined", member, "")
            case Suspected(member):
                self._changed("suspect", member, "")
            case Cleared(member):
                self._changed("alive", member, "")
            case Left(member):
                self._changed("left", member, "")
            case Lost(member, by):
                self._changed("lost", member, by)
            case Probe(member, ping):
                self._inquiries.probe(member, self._group)
                if ping:
                    self._inquiries.ping(member, self._group)

    def _tell(self, event: Event) -> None:
        with suppress(asyncio.QueueFull):  # it is asked after again
            self._inbox.put_nowait(event)


async def known_members(asker: Asker, timeout_s: float) -> Rows:
    """What the workers know of one another, and other nodes that answer; by name."""
    told, pinged = await asyncio.gather(
        asker.ask("members", destination=["@v2"], timeout_s=timeout_s),
        asker.ask("ping", timeout_s=timeout_s),
    )
    rows: dict[str, dict[str, Any]] = {}
    for view in told.replies.values():
        for row in filter(is_row, view if isinstance(view, list) else ()):
            known = rows.get(row["node"])
            if known is None or is_better(_opinion(row), _opinion(known)):
                rows[row["node"]] = row
    for node in pinged.replies:  # whatever others think of it
        row = rows.setdefault(node, {"node": node, "software": "unknown"})
        rows[node] = row | {"state": "alive", "silent_s": 0.0, "reason": ""}
    return [rows[node] for node in sorted(rows)]


class _Row(msgspec.Struct):
    """What a node must say of another for it to be believed."""

    node: Annotated[str, msgspec.Meta(max_length=1000)]
    state: Literal["alive", "suspect", "lost", "left"]
    software: Annotated[str, msgspec.Meta(max_length=1000)]
    pid: Count
    incarnation: Count
    clock: Count
    freq_s: Seconds
    silent_s: Seconds


def is_row(row: Any) -> bool:
    try:
        msgspec.convert(row, _Row)
    except msgspec.ValidationError:
        return False
    return True


def _opinion(row: dict[str, Any]) -> Opinion:
    return Opinion(row["state"], row["silent_s"], row.get("incarnation", 0), row.get("freq_s", HEARTBEAT_S))
