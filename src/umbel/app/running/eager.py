"""Eager mode: tasks run where they are sent, for tests and for `Task.apply`.

The call is encoded, decoded and traced exactly as on its way through a broker and a child; only
the waiting is left out: an ETA is due at once, a retry follows at once.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import count
from typing import TYPE_CHECKING

import msgspec

from umbel.app.running.tracer import Tracer
from umbel.backends.interface import ChordPart
from umbel.brokers.interface import Refused
from umbel.pools.interface import Job, Outcome
from umbel.protocol.delivery.states import READY_STATES, SUCCESS
from umbel.wire.message import Outgoing, StoredResult
from umbel.wire.revoke import Revoke
from umbel.wire.task import read_headers

if TYPE_CHECKING:
    from umbel.app.interfaces import RunningApp

RESULTS_MAX = 10_000
EAGER_NODE = "eager@localhost"


class _Parts(msgspec.Struct):
    size: int
    added: set[str] = set()
    parts: dict[str, ChordPart] = {}


class EagerBackend:
    """Results of eager mode, in memory; the oldest go at the limit."""

    url = "eager://"

    def unique_holder(self, key: str) -> str | None:
        """The task that holds this key; none here, where a task has ended before another is sent."""
        return None

    def __init__(self) -> None:
        self._results: OrderedDict[str, StoredResult] = OrderedDict()
        self._chords: OrderedDict[str, _Parts] = OrderedDict()
        self._groups: OrderedDict[str, bytes] = OrderedDict()

    def shares_settle(self, broker_url: str) -> bool:
        return False

    def store(self, results: Sequence[StoredResult]) -> None:
        for result in results:
            kept = self._results.get(result.task_id)
            if kept is None or kept.status != SUCCESS:
                self._results[result.task_id] = result
        while len(self._results) > RESULTS_MAX:
            self._results.popitem(last=False)

    def read(self, task_ids: Iterable[str], timeout_s: float | None = None) -> Mapping[str, StoredResult]:
        return {one: self._results[one] for one in task_ids if one in self._results}

    def wait(self, task_ids: Iterable[str], timeout_s: float | None) -> Mapping[str, StoredResult]:
        """A missing result stays missing: no other process runs these tasks."""
        return {one: kept for one, kept in self.read(task_ids).items() if kept.status in READY_STATES}

    async def wait_async(
        self, task_ids: Iterable[str], timeout_s: float | None
    ) -> Mapping[str, StoredResult]:
        return self.wait(task_ids, timeout_s)

    async def read_async(
        self, task_ids: Iterable[str], timeout_s: float | None = None
    ) -> Mapping[str, StoredResult]:
        return self.read(task_ids)

    def forget(self, task_ids: Iterable[str]) -> None:
        for one in task_ids:
            self._results.pop(one, None)

    def start_chord(self, group_id: str, size: int) -> None:
        self._chords[group_id] = _Parts(size)
        while len(self._chords) > RESULTS_MAX:
            self._chords.popitem(last=False)

    def add_chord_part(self, part: ChordPart) -> Sequence[ChordPart] | None:
        chord = self._chords.get(part.group_id)
        if chord is None:
            return None
        chord.parts[part.task_id] = part
        if len(chord.parts) < chord.size + len(chord.added):
            return None
        return sorted(chord.parts.values(), key=lambda one: one.index or 0)

    def claim_chord(self, group_id: str, by: str) -> bool:
        return group_id in self._chords

    def grow_chord(self, group_id: str, task_id: str) -> None:
        if group_id in self._chords:
            self._chords[group_id].added.add(task_id)

    def end_chord(self, group_id: str, batch: Sequence[Outgoing]) -> Sequence[Refused]:
        """The runner sends what follows: here nothing can come in between."""
        self._chords.pop(group_id, None)
        return ()

    def save_group(self, group_id: str, payload: bytes) -> None:
        self._groups[group_id] = payload
        while len(self._groups) > RESULTS_MAX:
            self._groups.popitem(last=False)

    def read_group(self, group_id: str) -> bytes | None:
        return self._groups.get(group_id)

    def forget_group(self, group_id: str) -> None:
        self._groups.pop(group_id, None)

    def close(self) -> None:
        self._results.clear()


class EagerMode:
    """Whether tasks run where they are sent: always, by a setting, or inside a block of code.

    `app.eager()` holds for the code inside its block and what that calls, `everywhere` for all threads.
    """

    def __init__(self, app: "RunningApp", name: str) -> None:
        self._app = app
        self.was_entered = False  # a block, ever: else there is no runner but by the setting
        self._lasting: EagerRunner | None = None
        self._everywhere: EagerRunner | None = None
        self._of_block: ContextVar[EagerRunner | None] = ContextVar(f"umbel_eager_{name}", default=None)

    @property
    def runner(self) -> "EagerRunner | None":
        taking = self._of_block.get() or self._everywhere
        if taking is not None or not self._app.settings.task_always_eager:
            return taking
        if self._lasting is None:
            self._lasting = EagerRunner(self._app)
        return self._lasting

    @contextmanager
    def block(self) -> Iterator[None]:
        self.was_entered = True
        runner = self._of_block.get() or EagerRunner(self._app)
        token = self._of_block.set(runner)
        try:
            yield
        finally:
            self._of_block.reset(token)
            if self._of_block.get() is None:
                runner.close()

    @contextmanager
    def everywhere(self, runner: "EagerRunner") -> Iterator[None]:
        """Inside this block what any thread sends goes to `runner`."""
        self.was_entered = True
        before, self._everywhere = self._everywhere, runner
        try:
            yield
        finally:
            self._everywhere = before
            runner.close()

    def close(self) -> None:
        if self._lasting is not None:
            self._lasting.close()


class EagerRunner:
    def __init__(self, app: "RunningApp", backend: EagerBackend | None = None) -> None:
        self.backend = backend or EagerBackend()
        self._tracer = Tracer(app, hostname=EAGER_NODE, is_eager=True)
        self._most_returns = app.settings.task_max_deliveries
        self._numbers = count()

    def run(self, batch: Iterable[Outgoing]) -> None:
        """Run these and everything that follows from them."""
        waiting = deque((outgoing, 0) for outgoing in batch)
        while waiting:
            outgoing, returns = waiting.popleft()
            outcome = self.run_one(outgoing)
            waiting.extend((follow_up, 0) for follow_up in outcome.follow_ups)
            if self.comes_back(outcome, returns):
                waiting.append((outgoing, returns + 1))

    def run_one(self, outgoing: Outgoing) -> Outcome:
        """Run it and store its result; what follows from it is not sent."""
        headers = read_headers(outgoing.message)
        job = Job(next(self._numbers), headers.task, headers.id, outgoing.queue, outgoing.message)
        outcome = self._tracer(job)
        self.backend.store(outcome.results)
        return outcome

    def comes_back(self, outcome: Outcome, returns: int) -> bool:
        """Whether the task is to run again, as it asked; it has come back so often before."""
        return outcome.kind == "requeued" and returns + 1 < self._most_returns

    def revoke(self, revokes: Iterable[Revoke]) -> None:
        """Nothing to do: what was sent has ended."""

    def close(self) -> None:
        self._tracer.close()
