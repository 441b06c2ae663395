"""Stage: takes what is sent in place of a broker, keeps it, and runs it in this process.

Behind `umbel_inbox`, where calls wait until the test runs them, and `umbel_eager`, where they run as they
are sent. Both take the path of `app.eager()`: encoded, decoded and traced as by a worker, in the thread of
who runs them. What a worker decides about a message before it runs is decided here too: revoked or expired
calls end without running.

Without a clock nothing waits: a countdown is over at once, a retry follows at once. With `umbel_clock` a call
waits until the clock has been moved to its time. Calls that are due run in the order of their times, then in
that of their sending. Rates and priorities are a matter of workers and have no effect here.
"""

from collections.abc import Callable, Iterable, Mapping
from heapq import heapify, heappop, heappush
from itertools import count

from umbel.app.app import App
from umbel.app.running.eager import EagerBackend, EagerRunner
from umbel.clock import cluster_now
from umbel.errors import ResultTimeout, TaskRevoked
from umbel.launch.native import NativeProject
from umbel.pools.interface import Outcome
from umbel.protocol.delivery.delivery import Refusal
from umbel.protocol.delivery.states import REVOKED
from umbel.testing.calls import SentCall
from umbel.wire.message import Outgoing, StoredResult
from umbel.wire.revoke import Revoke

CALLS_MAX = 100_000  # that one test may send
RUNS_MAX = 10_000  # that one run may take: a task that sends itself would have no end


class Stage(EagerRunner):
    """`at_once`: what is sent runs, if it is due. `how`: what a test does to have a waiting call run."""

    def __init__(self, app: App, *, at_once: bool, how: str) -> None:
        super().__init__(app, StagedResults(self))
        self.how = how
        self.keeps_time = False  # calls that are not due wait
        self.calls: list[SentCall] = []
        self._waiting: dict[int, SentCall] = {}
        self._running: dict[int, SentCall] = {}
        self._app = app
        self._at_once = at_once
        self._revoked: set[str] = set()
        self._leave = NativeProject(app).end_without_running()
        self._sent = count(1)

    # -- what the app asks of a runner -----------------------------------------------------------

    def run(self, batch: Iterable[Outgoing]) -> None:
        sent = [self._taken(outgoing) for outgoing in batch]
        if self._at_once:
            self._work([call for call in sent if self.is_due(call)], self.is_due)

    def revoke(self, revokes: Iterable[Revoke]) -> None:
        for one in revokes:
            if one.expires_at > cluster_now():
                self._revoked.add(one.task_id)
            else:  # which takes it back
                self._revoked.discard(one.task_id)

    # -- what a test asks for --------------------------------------------------------------------

    def is_due(self, call: SentCall) -> bool:
        return not self.keeps_time or call.outgoing.not_before <= cluster_now()

    @property
    def waiting(self) -> list[SentCall]:
        """Sent and not run, in the order of sending."""
        return list(self._waiting.values())

    @property
    def unended(self) -> list[SentCall]:
        return [*self._running.values(), *self._waiting.values()]

    def next_due(self) -> float | None:
        """Of the calls that this stage runs by itself when their time comes."""
        if not self._at_once or not self.keeps_time:
            return None
        return min((call.outgoing.not_before for call in self.waiting), default=None)

    def catch_up(self) -> None:
        """The clock was moved."""
        if self._at_once:
            self.run_waiting(self.is_due)

    def run_waiting(self, chosen: Callable[[SentCall], bool]) -> list[SentCall]:
        """Run all that are chosen, and those that they send."""
        return self._work([call for call in self.waiting if chosen(call)], chosen)

    def run_first(self, chosen: Callable[[SentCall], bool]) -> SentCall | None:
        """Run the first of those that are chosen, and nothing else."""
        todo = [(call.outgoing.not_before, call.number) for call in self.waiting if chosen(call)]
        call = self._waiting.pop(min(todo)[1]) if todo else None
        if call is not None:
            self.run_call(call)
        return call

    def run_call(self, call: SentCall) -> list[SentCall]:
        """Run this one; the calls that it leaves to be run."""
        sent_before = len(self.calls)
        why = self._refusal(call)
        if why is not None:
            return self._end(call, why)
        self._running[call.number] = call
        outcome = self.run_one(call.outgoing)
        del self._running[call.number]
        call.ended = outcome.kind
        call.error = _told(outcome)
        left = [self._taken(follow_up) for follow_up in outcome.follow_ups]
        if self.comes_back(outcome, call.returns):
            left.append(self._taken(call.outgoing, call.returns + 1))
        # Where calls run as they are sent, those that the task itself sent have run.
        return left if self._at_once else self.calls[sent_before:]

    def forget(self) -> None:
        self.calls.clear()
        self._waiting.clear()

    # -- how ---------------------------------------------------------------------------------------

    def _taken(self, outgoing: Outgoing, returns: int = 0) -> SentCall:
        call = SentCall(self._app, outgoing, next(self._sent), returns)
        if len(self.calls) >= CALLS_MAX:
            raise RuntimeError(
                f"{CALLS_MAX} calls were sent in one test, which is the limit; the last is {call}"
            )
        self.calls.append(call)
        self._waiting[call.number] = call
        return call

    def _work(self, first: list[SentCall], chosen: Callable[[SentCall], bool]) -> list[SentCall]:
        ran: list[SentCall] = []
        todo = [(call.outgoing.not_before, call.number) for call in first]
        heapify(todo)
        while todo:
            call = self._waiting.pop(heappop(todo)[1], None)
            if call is None:  # another thread has it
                continue
            if len(ran) >= RUNS_MAX:
                raise RuntimeError(f"{RUNS_MAX} calls ran, and more wait, next {call}: does it send itself?")
            for left in self.run_call(call):
                if chosen(left):
                    heappush(todo, (left.outgoing.not_before, left.number))
            ran.append(call)
        return ran

    def _refusal(self, call: SentCall) -> Refusal | None:
        if call.id in self._revoked:
            return Refusal.REVOKED
        expires = call.expires
        return Refusal.EXPIRED if expires is not None and cluster_now() > expires.timestamp() else None

    def _end(self, call: SentCall, why: Refusal) -> list[SentCall]:
        """As a worker ends a message that must not run."""
        call.ended = why.value
        ending = self._leave(call.outgoing.message, call.queue, TaskRevoked(why.value), REVOKED)
        endings = [ending] if ending.before is None else [ending, ending.before()]
        for one in endings:
            self.backend.store(one.results)
        return [self._taken(follow_up) for one in endings for follow_up in one.follow_ups]


class StagedResults(EagerBackend):
    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self._stage = stage

    def unique_holder(self, key: str) -> str | None:
        return next((call.id for call in self._stage.unended if call.unique_key == key), None)

    def wait(self, task_ids: Iterable[str], timeout_s: float | None) -> Mapping[str, StoredResult]:
        """Nobody else runs these tasks: to wait for one that waits itself would be in vain."""
        wanted = list(task_ids)
        found = super().wait(wanted, timeout_s)
        waiting = next((call for call in self._stage.waiting if call.id in wanted), None)
        if waiting is not None and not found:
            raise ResultTimeout(f"no result yet: {waiting} was sent but has not run; {self._stage.how}")
        return found


def _told(outcome: Outcome) -> str:
    if outcome.kind not in ("failure", "rejected"):
        return ""
    return f"{outcome.summary}\n{outcome.traceback}".strip()
