"""Workers: what a monitor knows of the nodes from what they say of themselves.

A worker's newest beat and its newest farewell are kept, each the greatest by (time, clock, pid,
digest): a join again. Time goes first here, not the clock: whether a node is there is a question of
physical time, and a Celery worker that restarts without its state begins its clock at 0. So clocks
of different machines should not be hours apart, or an old run outlives a new one of the same name.

A name that only one event mentions may be made up. It is not proven, not listed by the monitors, and
the first to go when the table is full: a flood of names takes no place from the nodes that are there.

Whether a node is alive is said by the receiver's time where it is known, so that
a sender's wrong clock does not bury it. Membership that others act on is decided by gossip, not here.
"""

from collections.abc import Iterator

import msgspec

from umbel.events.digest import eid
from umbel.events.types import Event, WorkerBeat, WorkerOffline

WORKERS_MAX = 10_000
BEAT_S = 60.0
"""Expected of a node that does not say how often it beats."""
BEATS_MISSED = 2.0


class WorkerRecord(msgspec.Struct, gc=False):
    """One node, by name. `heard_at`: when anything of it was last received here.

    `is_proven`: two different events of it were heard.
    """

    hostname: str
    beat: WorkerBeat | None = None
    farewell: WorkerOffline | None = None
    heard_at: float | None = None
    is_proven: bool = False

    @property
    def newest(self) -> WorkerBeat:
        newest = self.farewell if self.is_offline else self.beat
        assert newest is not None, "a node is known by something it said"
        return newest

    @property
    def is_offline(self) -> bool:
        """Whether it said goodbye and nothing since."""
        if self.farewell is None or self.beat is None:
            return self.beat is None
        return _key(self.farewell) > _key(self.beat)

    def is_alive(self, now: float) -> bool:
        if self.is_offline or self.beat is None:
            return False
        last = self.beat.at_us / 1_000_000 if self.heard_at is None else self.heard_at
        every_s = self.beat.freq or BEAT_S
        return now < last + BEATS_MISSED * every_s


class Workers:
    """Nodes by name, at most `workers_max`; the unproven go first, and those heard of longest ago."""

    def __init__(self, workers_max: int = WORKERS_MAX) -> None:
        self._workers_max = workers_max
        self._workers: dict[str, WorkerRecord] = {}

    def put(self, event: Event, heard_at: float | None = None) -> None:
        if not isinstance(event, WorkerBeat):
            return
        hostname = event.hostname
        worker = self._workers.get(hostname)
        if worker is None:
            self._make_room()
            worker = self._workers[hostname] = WorkerRecord(hostname)
        elif not worker.is_proven:
            worker.is_proven = _key(event) != _key(worker.newest)
        if isinstance(event, WorkerOffline):
            if worker.farewell is None or _key(event) > _key(worker.farewell):
                worker.farewell = event
        elif worker.beat is None or _key(event) > _key(worker.beat):
            worker.beat = event
        if heard_at is not None and not isinstance(event, WorkerOffline):
            worker.heard_at = heard_at if worker.heard_at is None else max(worker.heard_at, heard_at)

    def absorb(self, other: "Workers") -> None:
        for worker in other:
            for event in (worker.beat, worker.farewell):
                if event is not None:
                    self.put(event, worker.heard_at)
            self._workers[worker.hostname].is_proven |= worker.is_proven

    def get(self, hostname: str) -> WorkerRecord | None:
        return self._workers.get(hostname)

    def alive(self, now: float) -> list[WorkerRecord]:
        return [worker for worker in self if worker.is_alive(now)]

    def __iter__(self) -> Iterator[WorkerRecord]:
        return iter(sorted(self._workers.values(), key=lambda worker: worker.hostname))

    def __len__(self) -> int:
        return len(self._workers)

    def _make_room(self) -> None:
        """A tenth at a time, so that a flood of names does not sort all of them for each."""
        if len(self._workers) < self._workers_max:
            return
        oldest = sorted(self._workers.values(), key=lambda worker: (worker.is_proven, _key(worker.newest)))
        for worker in oldest[: max(1, self._workers_max // 10)]:
            del self._workers[worker.hostname]


def _key(event: WorkerBeat) -> tuple[int, int, int, int]:
    return (event.at_us, event.clock, event.pid, eid(event))
