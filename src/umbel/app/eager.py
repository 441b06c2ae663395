"""Eager mode: tasks run where they are sent, for tests and for `Task.apply`.

The call is encoded, decoded and traced exactly as on its way through a broker and a child; only
the waiting is left out: an ETA is due at once, a retry follows at once.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from typing import TYPE_CHECKING

from umbel.app.tracer import Tracer
from umbel.pools.interface import Job
from umbel.protocol.states import READY_STATES, SUCCESS
from umbel.wire.message import Outgoing, StoredResult
from umbel.wire.task import read_headers

if TYPE_CHECKING:
    from umbel.app.app import App

RESULTS_MAX = 10_000
EAGER_NODE = "eager@localhost"


class EagerBackend:
    """Results of eager mode, in memory; the oldest go at the limit."""

    url = "eager://"

    def __init__(self) -> None:
        self._results: OrderedDict[str, StoredResult] = OrderedDict()

    def shares_settle(self, broker_url: str) -> bool:
        return False

    def store(self, results: Sequence[StoredResult]) -> None:
        for result in results:
            kept = self._results.get(result.task_id)
            if kept is None or kept.status != SUCCESS:
                self._results[result.task_id] = result
        while len(self._results) > RESULTS_MAX:
            self._results.popitem(last=False)

    def read(self, task_ids: Iterable[str]) -> Mapping[str, StoredResult]:
        return {one: self._results[one] for one in task_ids if one in self._results}

    def wait(self, task_ids: Iterable[str], timeout_s: float | None) -> Mapping[str, StoredResult]:
        """What is not here now never will be: nobody else runs these tasks."""
        return {one: kept for one, kept in self.read(task_ids).items() if kept.status in READY_STATES}

    async def wait_async(
        self, task_ids: Iterable[str], timeout_s: float | None
    ) -> Mapping[str, StoredResult]:
        return self.wait(task_ids, timeout_s)

    def forget(self, task_ids: Iterable[str]) -> None:
        for one in task_ids:
            self._results.pop(one, None)

    def close(self) -> None:
        self._results.clear()


class EagerRunner:
    def __init__(self, app: "App") -> None:
        self.backend = EagerBackend()
        self._tracer = Tracer(app, hostname=EAGER_NODE, is_eager=True)
        self._most_returns = app.settings.task_max_deliveries
        self._numbers = count()

    def run(self, batch: Iterable[Outgoing]) -> None:
        """Run these and everything that follows from them."""
        waiting = deque((outgoing, 0) for outgoing in batch)
        while waiting:
            outgoing, returns = waiting.popleft()
            headers = read_headers(outgoing.message)
            job = Job(next(self._numbers), headers.task, headers.id, outgoing.queue, outgoing.message)
            outcome = self._tracer(job)
            self.backend.store(outcome.results)
            waiting.extend((follow_up, 0) for follow_up in outcome.follow_ups)
            if outcome.kind == "requeued" and returns + 1 < self._most_returns:
                waiting.append((outgoing, returns + 1))

    def close(self) -> None:
        self._tracer.close()
