"""WorkerParts: the parts of a worker that remote control looks at and changes."""

from collections.abc import Callable, Mapping, Sequence
from time import time
from typing import Any

import msgspec

from umbel.control.state import Elect
from umbel.protocol.clock import LamportClock
from umbel.worker.context import WorkerContext
from umbel.worker.remote.mailbox_figures import MailboxFigures
from umbel.worker.steps.autoscaler import Autoscaler
from umbel.worker.steps.events import Events
from umbel.worker.steps.gossip import Gossip
from umbel.worker.steps.heart import Heart
from umbel.worker.steps.mingle import Mingle
from umbel.worker.steps.tasks import Tasks


class WorkerParts(msgspec.Struct, frozen=True):
    """`steps`: in starting order, each with what it requires."""

    context: WorkerContext
    events: Events
    heart: Heart
    tasks: Tasks
    gossip: Gossip
    mingle: Mingle
    autoscaler: Autoscaler
    mailbox: MailboxFigures
    elect: Elect
    stop: Callable[[], None]
    steps: Callable[[], Mapping[str, Sequence[str]]]


class WorkerNode:
    """Each section of the state is one of these (`control.state.NodeSection`)."""

    def __init__(self, parts: WorkerParts) -> None:
        self._parts = parts
        self._context = parts.context

    @property
    def app(self) -> Any:
        return self._context.settings.app

    @property
    def node(self) -> str:
        return self._context.identity.node

    @property
    def pid(self) -> int:
        return self._context.identity.pid

    @property
    def clock(self) -> LamportClock:
        return self._parts.events.clock

    @property
    def uptime_s(self) -> float:
        return time() - self._context.identity.incarnation / 1e6
