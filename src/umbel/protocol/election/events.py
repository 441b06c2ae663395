"""Inputs and outputs of the elections machine (`election.py`).

A call of the store carries `sent_s`, the machine's boot time when it requested the call, and the reply
returns the same number. All times that a reply allows are counted from it, because it is certain to lie
before the store's decision. A call that failed or timed out has no reply: the machine calls again by its
timer.
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
    """The progress of one election at one node."""

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
    """The sweep found this election open, or its holder's time expired."""

    request: ElectionRequest


class ElectedReceived(Value):
    """A node, perhaps this one, reports that `winner` (`hostname.pid.inc`) holds the election.

    `request` is missing if the event was too large to carry it.
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
    """The handler ended. If it raised, `ok` is false and `outcome` is the error.

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
    """The worker stops: accept no requests, let running handlers finish, forget everything else."""


# ---- effects ---------------------------------------------------------------------------------------


class CallClaim(Value):
    """Call `claim_election(key, holder, request, ttl_s)`; answer with ClaimReplied."""

    election_id: str
    key: str
    holder: str
    request: ElectionRequest
    ttl_s: float
    sent_s: float


class CallStart(Value):
    """Call `start_election(key, holder, term)`; answer with StartReplied."""

    election_id: str
    key: str
    holder: str
    term: int
    sent_s: float


class CallRenew(Value):
    """Call `renew_election(key, holder, term)`; answer with RenewReplied."""

    election_id: str
    key: str
    holder: str
    term: int
    sent_s: float


class CallFinish(Value):
    """Call `finish_election(key, holder, term, outcome)`; answer with FinishReplied."""

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

    `deadline_s` is on the boot clock: until then this node holds the election; Prolong extends it.
    """

    request: ElectionRequest
    key: str
    term: int
    attempt: int
    deadline_s: float


class Prolong(Value):
    """Extend the running handler's deadline to `deadline_s`."""

    election_id: str
    term: int
    deadline_s: float


class CancelHandler(Value):
    """Ask the running handler to stop; it still answers with HandlerEnded."""

    election_id: str
    term: int
    reason: str


class Resend(Value):
    """Broadcast the request command again: this node has no handler for it, but another node may have one."""

    request: ElectionRequest


class Dropped(Value):
    """A request was not accepted. `shed`: the table is full, and the sweep will return it."""

    election_id: str
    reason: str
    shed: bool = False


class Finished(Value):
    """This node closed its record of the election, after its call was confirmed or an event arrived.

    `state` is None if this node could never take part.
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
    """Return the outcome of a handler in the form that the store and the event use."""
    text = (f"ok: {outcome}" if outcome else "ok") if ok else ERROR_PREFIX + outcome
    return text[:OUTCOME_CHARACTERS_MAX]


# ---- the view --------------------------------------------------------------------------------------


class RecordView(Value):
    """One election in a snapshot. `finishing`: the handler has ended, but the store has not confirmed it."""

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
