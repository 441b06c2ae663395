"""ElectionContext: what the handler of an election gets."""

from umbel.clock import boot_time_s
from umbel.protocol.election.events import RunHandler
from umbel.protocol.leadership.coordination import Policy


class ElectionContext:
    """One run of a handler: the election, its term, and whether this node still leads it.

    A handler that must not act twice calls `still_mine()` before each effect, and passes on the term, so that
    the receiver of the effect can refuse an older one.
    """

    def __init__(self, order: RunHandler) -> None:
        request = order.request
        self.election_id = request.election_id
        self.topic = request.topic
        self.policy: Policy = request.policy
        self.key = order.key
        self.term = order.term
        self.attempt = order.attempt
        self.cancelled = ""  # why this node no longer leads, once that is so
        self.stopped = False  # the last `still_mine()` returned False
        self._deadline_s = order.deadline_s

    def deadline(self) -> float:
        """Return until when this node certainly leads, on CLOCK_BOOTTIME; it moves while the handler runs."""
        return self._deadline_s

    def still_mine(self) -> bool:
        """Return whether to go on. A handler that returns after False was stopped; another run follows."""
        self.stopped = bool(self.cancelled) or boot_time_s() >= self._deadline_s
        return not self.stopped

    def prolong(self, deadline_s: float) -> None:
        """Move the deadline; called by the worker."""
        self._deadline_s = deadline_s

    def cancel(self, reason: str) -> None:
        """Note why this node no longer leads; called by the worker."""
        self.cancelled = reason

    def __repr__(self) -> str:
        return f"<election {self.election_id!r} of {self.topic!r}, term {self.term}, attempt {self.attempt}>"
