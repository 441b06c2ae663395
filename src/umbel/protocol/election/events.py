"""What goes into the elections machine and what comes out; `election.py` decides.

A call of the store carries `sent_s`, the machine's boot time when it asked for the call, and the reply
carries the same number back: what a reply allows is counted from the moment of asking, because that is the
one moment known to lie before the store's decision. A call that failed or timed out has no reply: the machine
calls again by its own timer.
"""

from enum import StrEnum

from umbel.protocol.leadership.coordination import ElectionReply, ElectionRequest, ElectionState, Policy
from umbel.protocol.machine import Value


class Phase(StrEnum):
    """What a `worker-elected` event reports about an election."""

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
    """A request arrived by the control command or from a durable intake."""

    request: ElectionRequest


class Swept(Value):
    """The sweep found this election open, or held by a node whose time is over."""

    request: ElectionRequest


class ElectedReceived(Value):
    """A node, perhaps this one, reports that `winner` (`hostname.pid.inc`) holds the election.

    `request` is missing where the event was too large to carry it.
    """

    election_id: str
    winner: str
    term: int
    attempt: int
    request: ElectionRequest | None


class ClosedReceived(Value):
    """A node reports that the election is over."""

    election_id: str
    phase: Phase


class ClaimReplied(Value):
    """The store replied to CallClaim."""

    election_id: str
    sent_s: float
    reply: ElectionReply


class StartReplied(Value):
    """The store replied to CallStart."""

    election_id: str
    term: int
    sent_s: float
    ok: bool


class RenewReplied(Value):
    """The store replied to CallRenew."""

    election_id: str
    term: int
    sent_s: float
    ok: bool


class FinishReplied(Value):
    """The store replied to CallFinish."""

    election_id: str
    term: int
    ok: bool


class HandlerEnded(Value):
    """The handler returned, or raised: then `ok` is false and `outcome` is the error.

    `stopped`: its last `still_mine()` returned false.
    """

    election_id: str
    term: int
    ok: bool
    outcome: str = ""
    stopped: bool = False


class HolderLost(Value):
    """Membership declared the process `hostname.pid.inc` lost."""

    holder: str


class StopElections(Value):
    """The worker stops: take nothing new, let running handlers finish, forget everything else."""


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


class PublishElected(Value):
    """Broadcast a `worker-elected` event. Phase ELECTED carries the request, for nodes that may take over."""

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

    `deadline_s` is on the boot clock: until then the election is this node's; Prolong moves it.
    """

    request: ElectionRequest
    key: str
    term: int
    attempt: int
    deadline_s: float


class Prolong(Value):
    """The running handler's election is this node's until `deadline_s`."""

    election_id: str
    term: int
    deadline_s: float


class CancelHandler(Value):
    """Ask the running handler to stop; it still answers with HandlerEnded."""

    election_id: str
    term: int
    reason: str


class Resend(Value):
    """Broadcast the request command once more: this node has no handler for it, another may."""

    request: ElectionRequest


class Dropped(Value):
    """A request was not taken. `shed`: the table is full, and the sweep will return it."""

    election_id: str
    reason: str
    shed: bool = False


class Finished(Value):
    """This node's record of the election is closed, by its own call or by an event.

    `state` is None when this node could never take part.
    """

    election_id: str
    state: ElectionState | None
    outcome: str = ""


Event = (
    Asked
    | Swept
    | ElectedReceived
    | ClosedReceived
    | ClaimReplied
    | StartReplied
    | RenewReplied
    | FinishReplied
    | HandlerEnded
    | HolderLost
    | StopElections
)
Effect = (
    CallClaim
    | CallStart
    | CallRenew
    | CallFinish
    | PublishElected
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
    """The outcome of a handler, as the store and the event carry it."""
    text = (f"ok: {outcome}" if outcome else "ok") if ok else ERROR_PREFIX + outcome
    return text[:OUTCOME_CHARACTERS_MAX]


# ---- the view --------------------------------------------------------------------------------------


class RecordView(Value):
    """One election as a snapshot shows it. `finishing`: the handler has ended and the store has not confirmed
    it.
    """

    election_id: str
    stage: Stage
    term: int
    attempt: int
    winner: str
    timer_s: float | None
    finishing: bool
    request_bytes: int


class Snapshot(Value):
    """The state of the table, for checkers and for people."""

    records: tuple[RecordView, ...]
    request_bytes: int
    shed: int
    stopping: bool
