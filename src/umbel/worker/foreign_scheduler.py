"""A scheduler of another library, which knows nothing of leases, run under a lease.

It runs in a separate thread, only while this worker holds the lease, and may block. It calls `still_leader`
of its term before each send. What it sends through `publish` is sent under the lease and together with its
state, so a leader that was cut off sends nothing and the next one begins where the state ends.

Where it stops being right: what it sends by other ways is not fenced. A process that is suspended between
`still_leader` and such a send may send while another leads. One that dies between a send and `save_state`
causes the next leader to repeat that send.
"""

import asyncio
import logging
import math
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from umbel.backoff import Backoff
from umbel.errors import BrokerUnavailable
from umbel.wire.message import Outgoing

if TYPE_CHECKING:
    from umbel.brokers.coordination import CoordinationStore
    from umbel.coordination.driver import LeaseKeeper
    from umbel.worker.context import Counters

log = logging.getLogger("umbel.worker.scheduler")
FOREIGN_LEASE = "scheduler-foreign"
STATE_MAX_BYTES = 1024 * 1024
CALL_TIMEOUT_S = 5.0
WAIT_MIN_S, WAIT_MAX_S = 0.001, 300.0  # between two ticks, whatever the scheduler returns
RETRY_MAX_S = 30.0
TURN_S = 0.5  # how often a term that waits for its turn checks whether it has ended
R = TypeVar("R")


class SchedulerTerm:
    """One term of this worker as the leader, for its scheduler's thread; built on the loop.

    Its methods block.

    Those that ask the store raise BrokerUnavailable when it does not answer. The change may have been made
    all the same; `load_state` shows that.
    """

    def __init__(
        self, store: "CoordinationStore", keeper: "LeaseKeeper", number: int, counters: "Counters"
    ) -> None:
        self.has_ended = False
        self._store = store
        self._keeper = keeper
        self._number = number
        self._counters = counters
        self._loop = asyncio.get_running_loop()

    def still_leader(self) -> bool:
        """Return whether the scheduler may send now, by the time for which the lease was granted."""
        return not self.has_ended and self._keeper.term == self._number and self._keeper.still_mine()

    def load_state(self) -> bytes:
        """Return what was saved last, by this worker or an earlier leader; b"" at first."""
        return self._ask(self._store.read_lease(self._keeper.name)).data

    def save_state(self, state: bytes) -> bool:
        """Save the state; false if this worker no longer leads, and nothing was saved."""
        _check(state)
        keeper = self._keeper
        return self._ask(self._store.update_lease(keeper.name, keeper.holder, self._number, state))

    def publish(self, messages: Sequence[Outgoing], state: bytes) -> bool:
        """Send and save in one step, where the broker has one; else the state is saved first.

        False: this worker no longer leads, and nothing was sent or saved.
        """
        _check(state)
        if not self.still_leader():
            return False
        name, holder = self._keeper.name, self._keeper.holder
        done = self._ask(self._store.fenced_publish(name, holder, self._number, tuple(messages), data=state))
        self._counters.periodic_sent += len(messages) if done else 0
        return done

    def _ask(self, question: Coroutine[Any, Any, R]) -> R:
        """Return the store's answer. The call runs on the loop, which owns the broker's connection."""
        asked = asyncio.run_coroutine_threadsafe(_in_time(question), self._loop)
        try:
            return asked.result(2 * CALL_TIMEOUT_S)  # a stopped loop never answers
        except TimeoutError:
            asked.cancel()
            raise BrokerUnavailable(
                "the broker, which stores the scheduler's lease, did not answer in time"
            ) from None


async def _in_time(question: Coroutine[Any, Any, R]) -> R:
    async with asyncio.timeout(CALL_TIMEOUT_S):
        return await question


def _check(state: bytes) -> None:
    if len(state) > STATE_MAX_BYTES:
        raise ValueError(
            f"the scheduler's state has {len(state)} bytes, over the limit of {STATE_MAX_BYTES}: nothing was "
            "saved or sent; define fewer periodic tasks"
        )


# Returns an object with these methods, all called in the scheduler's thread, one after the other:
#
# - `start()`: begin a term; called again, on a new object, after it raised;
# - `tick()`: send what is due, and return in how many seconds to be called again;
# - `close(lost)`: end the term; `lost`: another worker may lead already, so nothing must be written or sent.
MakeScheduler = Callable[[SchedulerTerm], Any]


class SchedulerThread:
    """One term of one scheduler.

    All terms share `turn`: the scheduler of the last term may still be in a tick.

    What the scheduler raises is logged, and its tick is retried.
    """

    def __init__(self, make: MakeScheduler, term: SchedulerTerm, turn: threading.Lock) -> None:
        self.over = threading.Event()
        self._make = make
        self._term = term
        self._turn = turn
        self._end_requested = threading.Event()
        self._lost = False
        self._scheduler: Any = None
        threading.Thread(target=self._run, name="umbel-scheduler", daemon=True).start()

    def end(self, *, lost: bool) -> None:
        """Let no further tick begin. Returns at once; `over` is set when `close` has returned."""
        self._lost = self._lost or lost
        self._end_requested.set()

    def _run(self) -> None:
        while not self._end_requested.is_set():
            if self._turn.acquire(timeout=TURN_S):
                self._lead()
                self._turn.release()
        self.over.set()

    def _lead(self) -> None:
        """Call `tick` until the term ends, then `close`. What the scheduler raises ends no term."""
        backoff = Backoff(most_s=RETRY_MAX_S)
        while not self._end_requested.is_set():
            try:
                wait_s = self._tick()
                backoff.reset()
            except (Exception, SystemExit) as error:  # of the other library's scheduler
                log.error("scheduler raised an exception; retrying", exc_info=error)
                wait_s = backoff.wait_s()
            self._end_requested.wait(wait_s)
        if self._scheduler is not None:
            try:
                self._scheduler.close(self._lost)
            except (Exception, SystemExit) as error:  # of the other library's scheduler
                text = "scheduler raised an exception in close(); what it had not saved may be lost"
                log.error(text, exc_info=error)

    def _tick(self) -> float:
        if self._scheduler is None:
            made = self._make(self._term)
            made.start()
            self._scheduler = made
        wait_s = float(self._scheduler.tick())
        return WAIT_MIN_S if math.isnan(wait_s) else min(max(wait_s, WAIT_MIN_S), WAIT_MAX_S)
