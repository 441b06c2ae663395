"""Trust: whether something that somebody sent may be obeyed, once its signature was compared.

A signature says who spoke and when. It does not say that the words were not heard before: a copy of a
signed message is signed too. So each signature is good once, within a window of time. For tasks the
broker remembers which were used (`Broker.spend`); for control requests, which every node hears, each node
remembers its own (`Heard`).

What this does not do: it hides nothing, and it does not keep anybody from deleting, delaying or
re-ordering messages that are genuine.
"""

from collections.abc import Callable
from enum import Enum

from umbel.protocol.value import Value

REQUEST_WINDOW_S = 120.0
"""A control request is obeyed for so long after it was signed, and no clock may be further off."""

SIGNING_WINDOW_MAX_S = 7 * 86_400.0
"""No broker is asked to remember a signature for longer than this after its message was due."""

HEARD_MAX = 10_000


class Doubt(Enum):
    UNSIGNED = "unsigned"
    FORGED = "forged"
    STALE = "stale"
    REPLAYED = "replayed"


class Signed(Value):
    """The signature is that of a key we know. `mark` names this signature and no other."""

    key_id: str
    at: float
    mark: str


class Doubted(Value):
    doubt: Doubt
    why: str

    @property
    def reason(self) -> str:
        """For the dead letters."""
        return f"{self.doubt.value}: {self.why}"


def is_replayed(reason: str) -> bool:
    """Whether a dead letter is a copy. A copy is never signed again, or requeueing all would run it."""
    return reason.startswith(f"{Doubt.REPLAYED.value}: ")


Proof = Signed | Doubted


def age_doubt(signed: Signed, due: float, now: float, window_s: float) -> Doubted | None:
    """A task may wait for `window_s` after it was signed, or after it was due if that is later."""
    late_s = now - max(signed.at, due)
    if late_s > window_s:
        why = f"signed, or due, {late_s:.0f} s ago, which is more than 'signing_window_s' ({window_s:.0f} s)"
        return Doubted(Doubt.STALE, f"{why}; `umbel dlq requeue` signs it again")
    if signed.at - now > window_s:
        why = f"signed {signed.at - now:.0f} s in the future; compare the clocks of sender and worker"
        return Doubted(Doubt.STALE, why)
    return None


def remembered_until(signed: Signed, due: float, window_s: float) -> float:
    """For so long a copy of it could pass as fresh."""
    return max(signed.at, due) + window_s


class Heard:
    """The signed requests that one node has heard since it started, for as long as they are fresh."""

    def __init__(self, since: Callable[[], float]) -> None:
        self._since = since
        self._until: dict[str, float] = {}

    def doubt(self, signed: Signed, now: float) -> Doubted | None:
        """Why the request may not be obeyed; if it may, it is remembered."""
        if abs(now - signed.at) > REQUEST_WINDOW_S:
            why = f"signed {now - signed.at:.0f} s ago by this node's clock; sign and send it again"
            return Doubted(Doubt.STALE, why)
        if signed.at < self._since():
            return Doubted(Doubt.STALE, "signed before this node started; sign and send it again")
        if signed.mark in self._until:
            return Doubted(Doubt.REPLAYED, "this request was received before")
        self._forget(now)
        if len(self._until) >= HEARD_MAX:  # all of them signed by who has a key
            why = f"{HEARD_MAX} signed requests in {2 * REQUEST_WINDOW_S:.0f} s are the limit; send it later"
            return Doubted(Doubt.STALE, why)
        self._until[signed.mark] = now + 2 * REQUEST_WINDOW_S
        return None

    def _forget(self, now: float) -> None:
        while self._until and self._until[first := next(iter(self._until))] < now:
            del self._until[first]
