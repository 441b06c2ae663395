"""What goes into the elections machine and what comes out; `election.py` decides.

A call of the store carries `sent_s`, the machine's boot time when it asked for it, and its reply
carries the same number back: what a reply allows is counted from the moment of asking, because
that is the one moment known to lie before the store's decision. A call that failed or timed out
has no reply: the machine asks again by its own timer.
"""

from enum import StrEnum

from umbel.protocol.leadership.coordination import ElectionReply, ElectionRequest, ElectionState, Policy
from umbel.protocol.value import Value


class Phase(StrEnum):
    """What a `worker-elected` event tells of an election."""

    ELECTED = "elected"
    DONE = "done"
    FAILED = "failed"
    EXPIRED = "expired"


class Stage(StrEnum):
    """Where one node is with one election."""

    WAIT = "wait"
    CLAIM = "claim"
    START = "start"
    ACT = "act"
    WATCH = "watch"
    CLOSED = "closed"


# ---- events ----------------------------------------------------------------------------------------


class Asked(Value):
    """A request came by the control command or from a durable intake."""

    request: ElectionRequest


class Swept(Value):
    """The sweep found this election open, or held by one whose time is over."""

    request: ElectionRequest


class ElectedHeard(Value):
    """A node, perhaps this one, says that `winner` (`hostname.pid.inc`) holds the election.

    `request` is missing where the event was too large to carry it.
    """

    election_id: str
    winner: str
    term: int
    attempt: int
    request: ElectionRequest | None


class ClosedHeard(Value):
    """A node says that the election is over."""

    election_id: str
    phase: Phase


class ClaimReplied(Value):
    election_id: str
    sent_s: float
    reply: ElectionReply


class StartReplied(Value):
    election_id: str
    term: int
    sent_s: float
    ok: bool


class RenewReplied(Value):
    election_id: str
    term: int
    sent_s: float
    ok: bool


class FinishReplied(Value):
    election_id: str
    term: int
    ok: bool


class HandlerEnded(Value):
    """The handler returned, or raised: then `ok` is false and `outcome` says what.

    `stopped`: its last `still_mine()` returned false.
    """

    election_id: str
    term: int
    ok: bool
    outcome: str = ""
    stopped: bool = False


class HolderLost(Value):
    """Membership gave up the process `hostname.pid.inc`."""

    holder: str


class Stop(Value):
    """The worker stops: take nothing new, let what acts finish, forget the rest."""


# ---- effects ---------------------------------------------------------------------------------------


class CallClaim(Value):
    """`claim_election(key, holder, request, ttl_s)`; answer with ClaimReplied."""

    election_id: str
    key: str
    holder: str
    request: ElectionRequest
    ttl_s: float
    sent_s: float


class CallStart(Value):
    """`start_election(key, holder, term)`; answer with StartReplied."""

    election_id: str
    key: str
    holder: str
    term: int
    sent_s: float


class CallRenew(Value):
    """`renew_election(key, holder, term)`; answer with RenewReplied."""

    election_id: str
    key: str
    holder: str
    term: int
    sent_s: float


class CallFinish(Value):
    """`finish_election(key, holder, term, outcome)`; answer with FinishReplied."""

    election_id: str
    key: str
    holder: str
    term: int
    outcome: str


class Tell(Value):
    """Broadcast a `worker-elected` event. Phase ELECTED carries the request, for takers-over."""

    phase: Phase
    election_id: str
    topic: str
    policy: Policy
    winner: str
    term: int
    attempt: int
    outcome: str = ""
    request: ElectionRequest | None = None


class RunHandler(Value):
    """Run the topic's handler, off the event loop, and answer with HandlerEnded.

    `deadline_s` is on the boot clock: before it the election is still ours, Prolong moves it.
    """

    request: ElectionRequest
    key: str
    term: int
    attempt: int
    deadline_s: float


class Prolong(Value):
    """The running handler's election is ours until `deadline_s`."""

    election_id: str
    term: int
    deadline_s: float


class CancelHandler(Value):
    """Tell the running handler to stop; it still answers with HandlerEnded."""

    election_id: str
    term: int
    reason: str


class Resend(Value):
    """Broadcast the request command once more: no handler for it here, perhaps elsewhere."""

    request: ElectionRequest


class Dropped(Value):
    """A request was not taken. `shed`: the table is full, and the sweep will bring it back."""

    election_id: str
    reason: str
    shed: bool = False


class Finished(Value):
    """This node's record of the election is closed, by itself or by what it heard.

    `state` is None when this node never could take part.
    """

    election_id: str
    state: ElectionState | None
    outcome: str = ""


Event = (
    Asked
    | Swept
    | ElectedHeard
    | ClosedHeard
    | ClaimReplied
    | StartReplied
    | RenewReplied
    | FinishReplied
    | HandlerEnded
    | HolderLost
    | Stop
)
Effect = (
    CallClaim
    | CallStart
    | CallRenew
    | CallFinish
    | Tell
    | RunHandler
    | Prolong
    | CancelHandler
    | Resend
    | Dropped
    | Finished
)


OUTCOME_CHARACTERS_MAX = 1000
ERROR_PREFIX = "error: "


def outcome_text(ok: bool, outcome: str) -> str:
    """What the store and the event say of a handler that ended."""
    text = (f"ok: {outcome}" if outcome else "ok") if ok else ERROR_PREFIX + outcome
    return text[:OUTCOME_CHARACTERS_MAX]


# ---- the view --------------------------------------------------------------------------------------


class RecordView(Value):
    """One election as a snapshot shows it. `finishing`: the handler has ended, the store not told."""

    election_id: str
    stage: Stage
    term: int
    attempt: int
    winner: str
    timer_s: float | None
    finishing: bool
    request_bytes: int


class Snapshot(Value):
    """Everything a checker or a person may want to see of the table."""

    records: tuple[RecordView, ...]
    request_bytes: int
    shed: int
    stopping: bool
