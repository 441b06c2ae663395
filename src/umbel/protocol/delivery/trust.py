"""Trust: whether a message or a command may be obeyed, after its signature was checked.

A signature states which key signed and when. It does not show that the message was not received before: a
copy of a signed message is signed too. So each signature is valid once, within a window of time. For tasks
the broker remembers which were used (`Broker.spend`), and for longer than the window: a message that is too
old to run can then still be told from a copy of a message that ran. For control requests, which every node
receives, each node remembers those it received.

Trust is inherited. What the run of an unsigned message sends is unsigned, whatever keys its worker has.

What this does not do: it hides nothing, and it does not prevent anybody from deleting, delaying or reordering
genuine messages.
"""

from collections.abc import Callable
from enum import Enum

from umbel.protocol.machine import Value

REQUEST_WINDOW_S = 120.0
"""How long after its signing a control request is accepted; clocks may differ by no more."""

SIGNING_WINDOW_MAX_S = 7 * 86_400.0
"""The longest time that a task may wait after it was signed, or after it was due."""

GRACE_MAX_S = 6 * 3600.0
"""The longest time that a used signature is remembered after its window."""

HEARD_MAX = 10_000

UNSIGNED = ""
"""Stands for the cluster id where nothing that the task sends is signed."""


class Doubt(Enum):
    """Why a message or a request is not trusted."""

    UNSIGNED = "unsigned"
    FORGED = "forged"
    STALE = "stale"
    REPLAYED = "replayed"


class Signed(Value):
    """The signature is valid and of a known key. `mark` identifies this signature.

    `is_bound`: to this cluster and to the properties of the message. Those of Umbel 0.3 are not. `due`: when
    the task is due; 0: at once.
    """

    key_id: str
    at: float
    mark: str
    is_bound: bool = True
    due: float = 0.0

    @property
    def born(self) -> float:
        """When the task could first run: its age is counted from then."""
        return max(self.at, self.due)


class Doubted(Value):
    """The message is not trusted, with the reason."""

    doubt: Doubt
    why: str

    @property
    def reason(self) -> str:
        """The reason as dead letters and replies show it."""
        return f"{self.doubt.value}: {self.why}"


class ClusterId(Value):
    """What signatures are bound to. `since`: when the id was made; earlier ones are bound to nothing."""

    id: str
    since: float = 0.0


Proof = Signed | Doubted


def remembered_s(window_s: float) -> float:
    """How long after its signing or due time a used signature is remembered."""
    return window_s + min(window_s, GRACE_MAX_S)


def unbound_doubt(signed: Signed, now: float, since: float, accepted_s: float) -> Doubted | None:
    """Why a signature of Umbel 0.3, which is bound to no cluster, is not accepted; None if it is.

    Such signatures are accepted for `accepted_s` after the cluster got its id; 0: never.
    """
    if signed.is_bound:
        return None
    if accepted_s and signed.at <= since + accepted_s and now <= max(since, signed.due) + accepted_s:
        return None
    return Doubted(Doubt.FORGED, _UNBOUND)


_UNBOUND = (
    "its signature is not bound to this cluster, as those of Umbel 0.3 are not; 'signing_accept_unbound' has "
    "them verified for 'signing_window_s' after the cluster got its id; upgrade the sender"
)


def unknown_doubt(signed: Signed, now: float, window_s: float) -> Doubted | None:
    """Why it is unknown whether this signature was used: it is too old, or from the future; None if it is
    known.
    """
    late_s = now - signed.born
    if late_s > remembered_s(window_s):
        return Doubted(Doubt.STALE, f"signed, or due, {late_s:.0f} s ago; {_FORGOTTEN}")
    if signed.at - now > window_s:
        why = f"signed {signed.at - now:.0f} s in the future; compare the clocks of sender and worker"
        return Doubted(Doubt.STALE, why)
    return None


def forgotten_doubt(signed: Signed, now: float) -> Doubted:
    """The doubt about a signature that is older than what the broker remembers."""
    return Doubted(Doubt.STALE, f"signed {now - signed.at:.0f} s ago; {_FORGOTTEN}")


_FORGOTTEN = (
    "signatures that were used then are not remembered any more, so this may be a copy of a message that "
    "ran; `umbel dlq requeue --even-if-used` runs it all the same"
)


def age_doubt(signed: Signed, now: float, window_s: float) -> Doubted | None:
    """Why a task waited too long after it was signed or due; None if it did not.

    Ask this only about a signature that is known to be unused: otherwise a copy would be taken for a message
    that waited too long, and be signed again.
    """
    late_s = now - signed.born
    if late_s > window_s:
        why = f"signed, or due, {late_s:.0f} s ago, which is more than 'signing_window_s' ({window_s:.0f} s)"
        return Doubted(Doubt.STALE, f"{why}; it did not run, and `umbel dlq requeue` signs it again")
    return None


class SeenRequests:
    """The signed requests that one node has received since it started, while they are fresh."""

    def __init__(self, since: Callable[[], float]) -> None:
        self._since = since
        self._until: dict[str, float] = {}

    def doubt(self, signed: Signed, now: float) -> Doubted | None:
        """Return why the request may not be obeyed; if it may, remember it and return None."""
        if abs(now - signed.at) > REQUEST_WINDOW_S:
            why = f"signed {now - signed.at:.0f} s ago by this node's clock; sign and send it again"
            return Doubted(Doubt.STALE, why)
        if signed.at < self._since():
            return Doubted(Doubt.STALE, "signed before this node started; sign and send it again")
        if signed.mark in self._until:
            return Doubted(Doubt.REPLAYED, "this request was received before")
        self._forget(now)
        if len(self._until) >= HEARD_MAX:  # all of them signed with a key
            why = f"{HEARD_MAX} signed requests in {2 * REQUEST_WINDOW_S:.0f} s are the limit; send it later"
            return Doubted(Doubt.STALE, why)
        self._until[signed.mark] = now + 2 * REQUEST_WINDOW_S
        return None

    def _forget(self, now: float) -> None:
        while self._until and self._until[first := next(iter(self._until))] < now:
            del self._until[first]
