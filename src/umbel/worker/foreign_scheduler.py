"""ForeignScheduler: a scheduler from another library, which knows nothing of leases, run under one.

It runs in a separate thread, only while this worker holds the lease, and may block. It calls `still_leader`
before each send. What it sends through `publish` is sent under the lease and together with its state, so a
leader that was cut off sends nothing and the next one begins where the state ends.

Where it stops being right: what it sends by other ways is not fenced. A process that is suspended between
`still_leader` and such a send may send while another leads. One that dies between a send and `save_state`
causes the next leader to repeat that send.
"""

import logging
import math
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from umbel.backoff import Backoff
from umbel.wire.message import Outgoing

log = logging.getLogger("umbel.worker.scheduler")
FOREIGN_LEASE = "scheduler-foreign"
STATE_MAX_BYTES = 1024 * 1024
WAIT_MIN_S, WAIT_MAX_S = 0.001, 300.0  # between two ticks, whatever the scheduler returns
RETRY_MAX_S = 30.0
TURN_S = 0.5  # how often a term that waits for its turn checks whether it has ended


class ForeignScheduler(Protocol):
    """Every method runs in the scheduler's thread, one after the other. What they raise is logged."""

    def start(self) -> None:
        """Begin a term: this worker leads. Called again, on a new object, after it raised."""
        ...

    def tick(self) -> float:
        """Send what is due; return in how many seconds to be called again. Retried later after it raised."""
        ...

    def close(self, lost: bool) -> None:
        """End the term. `lost`: another worker may lead already, so nothing must be written or sent."""
        ...


class Leadership(Protocol):
    """One term of this worker as the leader, for its scheduler's thread. Its methods block.

    Those that ask the store raise BrokerUnavailable when it does not answer. The change may have been made
    all the same; `load_state` shows that.
    """

    def still_leader(self) -> bool:
        """Return whether it may send now, by the time for which the lease was granted; asks no server."""
        ...

    def load_state(self) -> bytes:
        """Return what was saved last, by this worker or an earlier leader; b"" at first."""
        ...

    def save_state(self, state: bytes) -> bool:
        """Save the state; false if this worker no longer leads, and nothing was saved."""
        ...

    def publish(self, messages: Sequence[Outgoing], state: bytes) -> bool:
        """Send and save in one step, where the broker has one; else the state is saved first.

        False: this worker no longer leads, and nothing was sent or saved.
        """
        ...


MakeScheduler = Callable[[Leadership], ForeignScheduler]


class SchedulerThread:
    """One term of one scheduler. All terms share `turn`: the previous one may still be in a tick."""

    def __init__(self, make: MakeScheduler, leadership: Leadership, turn: threading.Lock) -> None:
        self.over = threading.Event()
        self._make = make
        self._leadership = leadership
        self._turn = turn
        self._asked = threading.Event()
        self._lost = False
        self._scheduler: ForeignScheduler | None = None
        threading.Thread(target=self._run, name="umbel-scheduler", daemon=True).start()

    def end(self, *, lost: bool) -> None:
        """Let no further tick begin. Returns at once; `over` is set when `close` has returned."""
        self._lost = self._lost or lost
        self._asked.set()

    def _run(self) -> None:
        while not self._asked.is_set():
            if self._turn.acquire(timeout=TURN_S):
                self._lead()
                self._turn.release()
        self.over.set()

    def _lead(self) -> None:
        backoff = Backoff(most_s=RETRY_MAX_S)
        while not self._asked.is_set():
            try:
                wait_s = self._go_on()
                backoff.reset()
            except (Exception, SystemExit) as error:  # of the other library's scheduler
                log.error("scheduler raised an exception; retrying", exc_info=error)
                wait_s = backoff.wait_s()
            self._asked.wait(wait_s)
        if self._scheduler is not None:
            try:
                self._scheduler.close(self._lost)
            except (Exception, SystemExit) as error:  # of the other library's scheduler
                text = "scheduler raised an exception in close(); what it had not saved may be lost"
                log.error(text, exc_info=error)

    def _go_on(self) -> float:
        if self._scheduler is None:
            made = self._make(self._leadership)
            made.start()
            self._scheduler = made
        wait_s = float(self._scheduler.tick())
        return WAIT_MIN_S if math.isnan(wait_s) else min(max(wait_s, WAIT_MIN_S), WAIT_MAX_S)
