"""Eager mode: tasks run where they are sent, for tests and for `Task.apply`.

A call is encoded, decoded and traced as on its way through a broker and a child. Only the waiting is left
out: a call with an ETA is due at once, and a retry follows at once.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import count
from typing import TYPE_CHECKING, Any

import msgspec

from umbel.app.running.tracer import Tracer
from umbel.backends.interface import Backend, ChordPart, Take
from umbel.brokers.interface import Refused
from umbel.pools.interface import Job, Outcome
from umbel.protocol.delivery.states import READY_STATES, SUCCESS
from umbel.wire.call import read_headers
from umbel.wire.message import Outgoing, StoredResult
from umbel.wire.records import Revoke

if TYPE_CHECKING:
    from umbel.app.app import App

RESULTS_MAX = 10_000
EAGER_NODE = "eager@localhost"


class _Parts(msgspec.Struct):
    size: int
    added: set[str] = set()
    parts: dict[str, ChordPart] = {}


class EagerBackend(Backend):
    """Results of eager mode, in memory; the oldest are dropped at the limit."""

    url = "eager://"

    def __init__(self) -> None:
        self._results: OrderedDict[str, StoredResult] = OrderedDict()
        self._chords: OrderedDict[str, _Parts] = OrderedDict()
        self._groups: OrderedDict[str, bytes] = OrderedDict()

    def unique_holder(self, key: str) -> str | None:
        """None: in eager mode a task has ended before another is sent."""
        return None

    def shares_settle(self, broker_url: str) -> bool:
        """False: there is no broker to settle messages with."""
        return False

    def store(self, results: Sequence[StoredResult]) -> None:
        """Store results; a success is never replaced."""
        for result in results:
            known = self._results.get(result.task_id)
            if known is None or known.status != SUCCESS:
                self._results[result.task_id] = result
        _drop_oldest(self._results)

    def read(self, task_ids: Iterable[str], timeout_s: float | None = None) -> Mapping[str, StoredResult]:
        """The results that are stored, by task id."""
        return {task_id: self._results[task_id] for task_id in task_ids if task_id in self._results}

    def wait(
        self, task_ids: Iterable[str], timeout_s: float | None, take: Take | None = None
    ) -> Mapping[str, StoredResult]:
        """The final results that are stored. No other process runs these tasks, so nothing is waited for."""
        found = {
            task_id: result
            for task_id, result in self.read(task_ids).items()
            if result.status in READY_STATES
        }
        if take is not None and found:
            take(found)
        return found

    async def wait_async(
        self, task_ids: Iterable[str], timeout_s: float | None, take: Take | None = None
    ) -> Mapping[str, StoredResult]:
        """The same as `wait`; it never waits."""
        return self.wait(task_ids, timeout_s, take)

    async def read_async(
        self, task_ids: Iterable[str], timeout_s: float | None = None
    ) -> Mapping[str, StoredResult]:
        """The same as `read`."""
        return self.read(task_ids)

    def forget(self, task_ids: Iterable[str]) -> None:
        """Remove stored results."""
        for task_id in task_ids:
            self._results.pop(task_id, None)

    def start_chord(self, group_id: str, size: int) -> None:
        """Expect this many parts of a chord."""
        self._chords[group_id] = _Parts(size)
        _drop_oldest(self._chords)

    def add_chord_part(self, part: ChordPart) -> Sequence[ChordPart] | None:
        """Count a part; return all parts once the last one has ended."""
        chord = self._chords.get(part.group_id)
        if chord is None:
            return None
        chord.parts[part.task_id] = part
        if len(chord.parts) < chord.size + len(chord.added):
            return None
        return sorted(chord.parts.values(), key=lambda ended: ended.index or 0)

    def claim_chord(self, group_id: str, by: str) -> bool:
        """Whether the body of this chord is still to be sent."""
        return group_id in self._chords

    def grow_chord(self, group_id: str, task_id: str) -> None:
        """Expect one more part of the chord."""
        if group_id in self._chords:
            self._chords[group_id].added.add(task_id)

    def end_chord(self, group_id: str, batch: Sequence[Outgoing]) -> Sequence[Refused]:
        """Remove the chord; the runner sends the body, and nothing can happen in between."""
        self._chords.pop(group_id, None)
        return ()

    def save_group(self, group_id: str, payload: bytes) -> None:
        """Store the members of a group."""
        self._groups[group_id] = payload
        _drop_oldest(self._groups)

    def read_group(self, group_id: str) -> bytes | None:
        """The stored members of a group; None without any."""
        return self._groups.get(group_id)

    def forget_group(self, group_id: str) -> None:
        """Remove the stored members of a group."""
        self._groups.pop(group_id, None)

    def close(self) -> None:
        """Drop all results."""
        self._results.clear()


def _drop_oldest(entries: OrderedDict[str, Any]) -> None:
    while len(entries) > RESULTS_MAX:
        entries.popitem(last=False)


class EagerMode:
    """Whether tasks run where they are sent: always, by a setting, or inside a block of code.

    `app.eager()` applies to the code inside its block and to what that code calls, `everywhere` to all
    threads.
    """

    def __init__(self, app: "App") -> None:
        self._app = app
        self.was_entered = False  # whether any block was entered; until then only the setting makes a runner
        self._lasting: EagerRunner | None = None
        self._everywhere: EagerRunner | None = None
        self._of_block: ContextVar[EagerRunner | None] = ContextVar(f"umbel_eager_{app.name}", default=None)

    @property
    def runner(self) -> "EagerRunner | None":
        """Runs the tasks that are sent here; None if they go to the broker."""
        runner = self._of_block.get() or self._everywhere
        if runner is not None or not self._app.settings.task_always_eager:
            return runner
        if self._lasting is None:
            self._lasting = EagerRunner(self._app)
        return self._lasting

    @contextmanager
    def block(self) -> Iterator[None]:
        """A block in which tasks run at once, for its code and the code that it calls."""
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
        """A block in which `runner` runs the tasks that any thread sends."""
        self.was_entered = True
        before, self._everywhere = self._everywhere, runner
        try:
            yield
        finally:
            self._everywhere = before
            runner.close()

    def close(self) -> None:
        """Close the runner of the setting `task_always_eager`."""
        if self._lasting is not None:
            self._lasting.close()


class EagerRunner:
    """Runs messages in this process and stores their results in memory."""

    def __init__(self, app: "App", backend: EagerBackend | None = None) -> None:
        self.backend = backend or EagerBackend()
        self._tracer = Tracer(app, hostname=EAGER_NODE, is_eager=True)
        self._most_returns = app.settings.task_max_deliveries
        self._numbers = count()

    def run(self, batch: Iterable[Outgoing]) -> None:
        """Run these messages and everything that follows from them."""
        waiting = deque((outgoing, 0) for outgoing in batch)
        while waiting:
            outgoing, returns = waiting.popleft()
            outcome = self.run_one(outgoing)
            waiting.extend((follow_up, 0) for follow_up in outcome.follow_ups)
            if self.comes_back(outcome, returns):
                waiting.append((outgoing, returns + 1))

    def run_one(self, outgoing: Outgoing) -> Outcome:
        """Run one message and store its result; its follow-ups are not sent."""
        headers = read_headers(outgoing.message)
        job = Job(next(self._numbers), headers.task, headers.id, outgoing.queue, outgoing.message)
        outcome = self._tracer(job)
        self.backend.store(outcome.results)
        return outcome

    def comes_back(self, outcome: Outcome, returns: int) -> bool:
        """Whether the task asked to run again and may; `returns`: how often it was requeued already."""
        return outcome.kind == "requeued" and returns + 1 < self._most_returns

    def revoke(self, revokes: Iterable[Revoke]) -> None:
        """Nothing to do: every task that was sent has ended."""

    def close(self) -> None:
        """Close the event loops of its tracer."""
        self._tracer.close()
