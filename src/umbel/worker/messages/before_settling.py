"""BeforeSettling: work that must come before a message is settled (`Ending.before`).

It blocks, so it is done off the loop. A call that does not return is waited for again, not repeated.
"""

from collections.abc import Callable

from umbel.brokers.interface import Tag
from umbel.errors import BrokerUnavailable
from umbel.pools.guard import Raised, Returned
from umbel.pools.off_loop import OffLoop
from umbel.worker.settings import Ending

TIMEOUT_S = 30.0  # for one attempt


class BeforeSettling:
    def __init__(self, work: Callable[[], Ending], attempts_max: int, joins: Tag | None) -> None:
        self.joins = joins
        self._work = work
        self._attempts_max = attempts_max
        self._attempts = 0
        self._call: OffLoop[Ending] | None = None

    async def attempt(self) -> Returned[Ending] | Raised:
        self._attempts += 1
        self._call = self._call or OffLoop("umbel-ending", self._work)
        try:
            happened = await self._call.ended(TIMEOUT_S)
        except TimeoutError:
            return Raised(BrokerUnavailable(f"the result backend did not answer within {TIMEOUT_S:g} s"))
        self._call = None
        return happened

    def goes_on(self, error: BaseException) -> bool:
        """Whether it is tried again after this error."""
        if self._attempts_max:
            return self._attempts < self._attempts_max
        return isinstance(error, BrokerUnavailable)
