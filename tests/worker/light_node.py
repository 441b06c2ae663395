"""LightNode: a worker that only knows others: its steps from the connection to gossip, no tasks.

Many of them fit into one process, each with its own connection to the embedded broker.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from tests.waiting import DEADLINE_S
from umbel.brokers.interface import BrokerSettings, Refused
from umbel.brokers.sqlite.broker import SqliteBroker
from umbel.control.client import ControlClient
from umbel.control.panel import ELECTION_REFUSED
from umbel.protocol.delivery.revoked import RevokedTasks
from umbel.protocol.membership.members import MemberState
from umbel.worker.bootsteps import Step
from umbel.worker.context import Ending, Identity, WorkerContext, WorkerSettings
from umbel.worker.events import Events
from umbel.worker.remote.control import Control
from umbel.worker.remote.mailbox import MailboxFigures
from umbel.worker.remote.view import WorkerParts, WorkerView
from umbel.worker.steps.gossip import Gossip
from umbel.worker.steps.heart import Heart
from umbel.worker.steps.mingle import Mingle
from umbel.worker.steps.pool import Autoscaler

_pids = count(1)


class LightNode:
    def __init__(self, name: str, home: Path, *, of_broker: Mapping[str, Any] = {}, **settings: Any) -> None:
        self.name = f"{name}@x"
        pid = next(_pids)
        self.broker = SqliteBroker(BrokerSettings(f"sqlite:///{home / 'queue.db'}", **of_broker))
        given: dict[str, Any] = {"heartbeat_interval_s": 0.1, "gossip_interval_s": 0.1, **settings}
        chosen = WorkerSettings(
            node=self.name,
            queues=(),
            tasks={},
            end_without_running=lambda *_, **__: Ending(),
            run_directory=home,
            **given,
        )
        pool = SimpleNamespace(describe=lambda: {"running": {}}, is_green=False)
        self.context = WorkerContext(
            chosen, Identity(self.name, pid, pid * 1000), self.broker, cast("Any", None), cast("Any", pool)
        )
        self.revoked = RevokedTasks()
        self.before_taking: dict[
            str, Callable[[], Coroutine[Any, Any, None]] | None
        ] = {}  # what tasks would wait for
        tasks = cast(
            "Any",
            SimpleNamespace(
                revoked=self.revoked,
                revokes=SimpleNamespace(read=_nothing),
                before_taking=self.before_taking.__setitem__,
                drop_revoked=lambda: None,
            ),
        )
        self.events = Events(self.context)
        self.heart = Heart(self.context, self.events)
        asker = ControlClient(self.broker)
        self.gossip = Gossip(self.context, self.events, self.heart, asker)
        self.mingle = Mingle(
            self.context, self.events, asker, tasks, self.gossip, take_time=lambda _node, _at_s: None
        )
        parts = WorkerParts(
            self.context,
            self.events,
            self.heart,
            tasks,
            self.gossip,
            self.mingle,
            Autoscaler(self.context),
            MailboxFigures(),
            elect=lambda _: ELECTION_REFUSED,
            stop=lambda: None,
            steps=dict,
        )
        view = WorkerView(parts)
        self.control = Control(
            self.context,
            self.events.clock,
            view,
            parts.mailbox,
            self.mingle.check_alone,
            members=tuple,
        )
        self._steps: list[Step] = [self.events, self.control, self.mingle, self.heart, self.gossip]

    async def start(self, group: asyncio.TaskGroup) -> "LightNode":
        await self.broker.open()
        for step in self._steps:
            step.adopt(group)
            await step.start()
        return self

    async def stop(self) -> None:
        for step in reversed(self._steps):
            await step.stop()
        await self.broker.close()

    async def die(self) -> None:
        """As if by SIGKILL: no goodbye, nothing is given back."""
        self.gossip._candidate._campaign and self.gossip._candidate._campaign.cancel()
        for step in self._steps:
            await step.end_background()
        await self.gossip.end_listening()
        await self.broker.close()

    def sees(self, state: MemberState = MemberState.ALIVE) -> set[str]:
        return {member.node.removesuffix("@x") for member in self.gossip.members() if member.state is state}


@asynccontextmanager
async def light_nodes(
    home: Path, *names: str, deadline_s: float = DEADLINE_S, **settings: Any
) -> AsyncIterator[dict[str, LightNode]]:
    """Nodes that have started; those that a test did not take out of the map stop at the end."""
    nodes: dict[str, LightNode] = {}
    async with asyncio.timeout(deadline_s), asyncio.TaskGroup() as group:
        for name in names:
            nodes[name] = await LightNode(name, home, **settings).start(group)
        yield nodes
        for node in nodes.values():
            await node.stop()


async def _nothing() -> None:
    return None


def nothing_refused(refused: Sequence[Refused]) -> None:
    assert not refused
