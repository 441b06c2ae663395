"""ElectionContext: what the handler of an election is given."""

from umbel.clock import boot_time_s
from umbel.protocol.election.events import RunHandler
from umbel.protocol.leadership.coordination import Policy


class ElectionContext:
    """One run of a handler: which election, under which term, and whether it is still ours.

    A handler that must not act twice tests `still_mine()` before each effect, and passes on the term, so
    that the receiver of the effect can refuse an older one.
    """

    def __init__(self, order: RunHandler) -> None:
        request = order.request
        self.election_id = request.election_id
        self.topic = request.topic
        self.policy: Policy = request.policy
        self.key = order.key
        self.term = order.term
        self.attempt = order.attempt
        self.cancelled = ""  # why, once it is
        self.stopped = False  # the last `still_mine()` returned false
        self._deadline_s = order.deadline_s

    def deadline(self) -> float:
        """Until when it is surely ours, on CLOCK_BOOTTIME; it moves while the handler runs."""
        return self._deadline_s

    def still_mine(self) -> bool:
        """Whether to go on. A handler that returns after a no has stopped: another run is to follow."""
        self.stopped = bool(self.cancelled) or boot_time_s() >= self._deadline_s
        return not self.stopped

    def prolong(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s

    def cancel(self, reason: str) -> None:
        self.cancelled = reason

    def __repr__(self) -> str:
        return f"<election {self.election_id!r} of {self.topic!r}, term {self.term}, attempt {self.attempt}>"
