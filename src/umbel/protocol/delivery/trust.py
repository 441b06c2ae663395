"""Trust: whether a message or a control request may be processed, after its signature was verified.

A signature shows which key signed, and when. It does not show that a message is new: a copy of a signed
message has a valid signature too. So each signature is valid once, within a time window. For tasks the broker
records used signatures (`Broker.spend`), for longer than the window, so that a message that is too old to run
can be distinguished from a copy of a message that ran. Control requests go to every node, so each node
remembers those that it received.

Trust is inherited: messages sent by the run of an unsigned message are unsigned, whatever keys its worker
has.

Limits: signing does not encrypt, and does not prevent anyone from deleting, delaying or reordering genuine
messages.
"""

from collections.abc import Callable
from enum import Enum

from umbel.protocol.machine import Value

REQUEST_WINDOW_S = 120.0
"""How long a control request is accepted after it was signed; clocks must not differ by more."""

SIGNING_WINDOW_MAX_S = 7 * 86_400.0
"""The longest time that a task may wait after it was signed or due."""

GRACE_MAX_S = 6 * 3600.0
"""The longest time that a used signature is remembered after its window."""

HEARD_MAX = 10_000

UNSIGNED = ""
"""Used as cluster id if nothing that the task sends is signed."""


class Doubt(Enum):
    """The reasons for not trusting a message or a request."""

    UNSIGNED = "unsigned"
    FORGED = "forged"
    STALE = "stale"
    REPLAYED = "replayed"


class Signed(Value):
    """The signature is valid, and its key is known. `mark` identifies this signature.

    `is_bound`: it is bound to this cluster and to the properties of the message; signatures of Umbel 0.3 are
    not. `due`: when the task is due; 0: at once.
    """

    key_id: str
    at: float
    mark: str
    is_bound: bool = True
    due: float = 0.0

    @property
    def born(self) -> float:
        """Return when the task could first run: its age counts from then."""
        return max(self.at, self.due)


class Doubted(Value):
    """The message is not trusted, with the reason."""

    doubt: Doubt
    why: str

    @property
    def reason(self) -> str:
        """Return the reason as dead letters and replies show it."""
        return f"{self.doubt.value}: {self.why}"


class ClusterId(Value):
    """The id that signatures are bound to. `since`: when the id was created; earlier signatures are not
    bound.
    """

    id: str
    since: float = 0.0


Proof = Signed | Doubted


def remembered_s(window_s: float) -> float:
    """Return how long a used signature is remembered after it was signed or due."""
    return window_s + min(window_s, GRACE_MAX_S)


def unbound_doubt(signed: Signed, now: float, since: float, accepted_s: float) -> Doubted | None:
    """Return why a signature of Umbel 0.3, which is bound to no cluster, is refused; None if it is accepted.

    Such signatures are accepted for `accepted_s` after the cluster got its id; 0: never.
    """
    if signed.is_bound:
        return None
    if accepted_s and signed.at <= since + accepted_s and now <= max(since, signed.due) + accepted_s:
        return None
    return Doubted(Doubt.FORGED, _UNBOUND)


_UNBOUND = (
    "its signature is not bound to this cluster (Umbel 0.3 binds none); 'signing_accept_unbound' "
    "accepts such signatures for 'signing_window_s' after the cluster got its id; upgrade the sender"
)


def unknown_doubt(signed: Signed, now: float, window_s: float) -> Doubted | None:
    """Return why it cannot be known whether this signature was used: it is too old, or from the future.

    Returns None if the broker knows it.
    """
    late_s = now - signed.born
    if late_s > remembered_s(window_s):
        return Doubted(Doubt.STALE, f"signed, or due, {late_s:.0f} s ago; {_FORGOTTEN}")
    if signed.at - now > window_s:
        why = f"signed {signed.at - now:.0f} s in the future; compare the clocks of sender and worker"
        return Doubted(Doubt.STALE, why)
    return None


def forgotten_doubt(signed: Signed, now: float) -> Doubted:
    """Return the doubt about a signature that is older than the broker's record of used signatures."""
    return Doubted(Doubt.STALE, f"signed {now - signed.at:.0f} s ago; {_FORGOTTEN}")


_FORGOTTEN = (
    "used signatures of that time are no longer remembered, so this may be a copy of a message that "
    "ran; `umbel dlq requeue --even-if-used` runs it anyway"
)


def age_doubt(signed: Signed, now: float, window_s: float) -> Doubted | None:
    """Return why a task waited too long after it was signed or due; None if it did not.

    Call this only for a signature that is known to be unused: otherwise a copy of an executed message would
    count as late, and could be signed again.
    """
    late_s = now - signed.born
    if late_s > window_s:
        why = f"signed, or due, {late_s:.0f} s ago, which is more than 'signing_window_s' ({window_s:.0f} s)"
        return Doubted(Doubt.STALE, f"{why}; it did not run, and `umbel dlq requeue` signs it again")
    return None


class SeenRequests:
    """The signed requests that one node has received since it started, until they expire."""

    def __init__(self, since: Callable[[], float]) -> None:
        self._since = since
        self._until: dict[str, float] = {}

    def doubt(self, signed: Signed, now: float) -> Doubted | None:
        """Return why the request must be refused; otherwise remember it and return None."""
        if abs(now - signed.at) > REQUEST_WINDOW_S:
            why = f"signed {now - signed.at:.0f} s ago by this node's clock; sign and send it again"
            return Doubted(Doubt.STALE, why)
        if signed.at < self._since():
            return Doubted(Doubt.STALE, "signed before this node started; sign and send it again")
        if signed.mark in self._until:
            return Doubted(Doubt.REPLAYED, "this request was received before")
        self._forget(now)
        if len(self._until) >= HEARD_MAX:  # all of them are signed with a valid key
            why = f"{HEARD_MAX} signed requests in {2 * REQUEST_WINDOW_S:.0f} s are the limit; send it later"
            return Doubted(Doubt.STALE, why)
        self._until[signed.mark] = now + 2 * REQUEST_WINDOW_S
        return None

    def _forget(self, now: float) -> None:
        while self._until and self._until[first := next(iter(self._until))] < now:
            del self._until[first]
