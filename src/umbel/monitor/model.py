"""ClusterModel: what the monitor shows, from the events it hears; no screen and no broker.

Tasks and workers come from the cluster's state, which is the same on every monitor that heard the
same. Beside it are kept the events of the tasks that were last heard of, for their timelines, and how
many came in each of the last seconds. All of it is bounded.
"""

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from umbel.events.receiver import EventReceiver
from umbel.events.state import ClusterState, Tracked
from umbel.events.timeline import timeline
from umbel.events.types import TaskEvent
from umbel.events.view import TaskRecord
from umbel.protocol.clock import LamportClock
from umbel.wire.event import decode_events

SECONDS_KEPT = 60
STORIES_MAX = 5_000
STORY_MAX = 200  # events of one task
STARTED, SUCCEEDED, FAILED = "task-started", "task-succeeded", "task-failed"


@dataclass(frozen=True, slots=True)
class Filter:
    """Which tasks are listed: a part of the name or the beginning of the id, a state, a worker."""

    text: str = ""
    state: str = ""
    worker: str = ""

    def admits(self, task: Tracked) -> bool:
        named = not self.text or self.text in (task.name or "") or task.uuid.startswith(self.text)
        return named and (not self.state or task.counted == self.state)


@dataclass(frozen=True, slots=True)
class MemberRow:
    node: str
    state: str  # alive, silent, left
    software: str
    clock: int
    active: int
    processed: int
    load: str
    silent_s: float


class Second:
    """What came in one second."""

    __slots__ = ("at", "events", "failed", "succeeded")

    def __init__(self, at: int) -> None:
        self.at, self.events, self.succeeded, self.failed = at, 0, 0, 0


class ClusterModel:
    def __init__(self, *, tasks_max: int = 20_000, clock: int = 0) -> None:
        self.state = ClusterState(tasks_max=tasks_max)
        self.receiver = EventReceiver(LamportClock(clock), decode_events)
        self._stories: OrderedDict[str, list[TaskEvent]] = OrderedDict()
        self._seconds: deque[Second] = deque(maxlen=SECONDS_KEPT)

    def take(self, body: bytes, now: float) -> None:
        """One message of the fan-out: an event, or a list of them."""
        second = self._second(int(now))
        for heard in self.receiver.receive(body):
            event = heard.event
            second.events += 1
            second.succeeded += event["type"] == SUCCEEDED
            second.failed += event["type"] == FAILED
            record = self.state.apply_one(event, now)
            if isinstance(record, TaskEvent):
                self._keep(record)

    def members(self, now: float) -> list[MemberRow]:
        """The nodes that were heard twice: any one event may have a name that was made up."""
        return [
            MemberRow(
                node=worker.hostname,
                state="left" if worker.is_offline else "alive" if worker.is_alive(now) else "silent",
                software=worker.newest.sw_ident or "",
                clock=worker.newest.clock,
                active=worker.newest.active or 0,
                processed=worker.newest.processed or 0,
                load=_load(worker.newest.loadavg),
                silent_s=max(0.0, now - (worker.heard_at or now)),
            )
            for worker in self.state.workers
            if worker.is_proven
        ]

    def tasks(self, wanted: Filter, limit: int) -> list[TaskRecord]:
        """The newest in Lamport order."""
        return self.state.tasks(worker=wanted.worker or None, limit=limit, admits=wanted.admits)

    def story(self, uuid: str) -> list[TaskEvent]:
        """What was heard of a task, in its causal order."""
        return timeline(self._stories.get(uuid, ()))

    def rates(self, now: float, *, over: int = 5) -> tuple[float, float, float]:
        """Events, successes and failures a second, over the last whole seconds."""
        end = int(now)
        recent = [one for one in self._seconds if end - over <= one.at < end]
        events, succeeded, failed = (
            sum(one.events for one in recent),
            sum(one.succeeded for one in recent),
            sum(one.failed for one in recent),
        )
        return events / over, succeeded / over, failed / over

    def history(self, now: float) -> Sequence[int]:
        """Tasks that ended in each of the last seconds, oldest first."""
        ended = {one.at: one.succeeded + one.failed for one in self._seconds}
        return [ended.get(at, 0) for at in range(int(now) - SECONDS_KEPT, int(now))]

    def _second(self, at: int) -> Second:
        if not self._seconds or self._seconds[-1].at < at:
            self._seconds.append(Second(at))
        return self._seconds[-1]

    def _keep(self, record: TaskEvent) -> None:
        story = self._stories.get(record.uuid)
        if story is None:
            story = self._stories[record.uuid] = []
            if len(self._stories) > STORIES_MAX:
                self._stories.popitem(last=False)
        elif len(story) >= STORY_MAX:
            return
        story.append(record)


def _load(loadavg: list[Any] | None) -> str:
    return f"{loadavg[0]:.2f}" if loadavg and isinstance(loadavg[0], int | float) else ""
