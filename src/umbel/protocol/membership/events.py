"""What goes into the membership machine and what comes out; `gossip.py` decides.

One run of a node is (node, inc, pid). `inc` is the microsecond its process started, and 0 for a
node that sends none, as Celery's: there the process id tells one run from the next.
"""

from enum import StrEnum
from typing import Literal

from umbel.protocol.value import Value


class MemberState(StrEnum):
    ALIVE = "alive"
    SUSPECT = "suspect"  # silent for too long; asked, and others asked about it
    LOST = "lost"  # silent to the end of its time
    LEFT = "left"  # it said so itself


GONE = frozenset({MemberState.LOST, MemberState.LEFT})


class Kind(StrEnum):
    """What an event of a node says about the node."""

    ONLINE = "online"
    BEAT = "beat"
    OFFLINE = "offline"
    OTHER = "other"  # any other event: it lives


class Member(Value):
    """One node as this one sees it. `last_heard` and `since` (of its state) are Unix time here."""

    node: str
    inc: int
    pid: int
    state: MemberState
    software: str
    clock: int
    freq_s: float
    last_heard: float
    since: float
    reason: str = ""
    observed: bool = False  # whether it is in observed mode, as its heartbeats say

    @property
    def holder(self) -> str:
        """This run of it, as the store names holders of elections and leases."""
        return f"{self.node}.{self.pid}.{self.inc}"


# ---- events ----------------------------------------------------------------------------------------


class Heard(Value):
    """An event of another node arrived. `sent_at` is the sender's Unix time."""

    node: str
    inc: int
    pid: int
    kind: Kind
    clock: int = 0
    sent_at: float = 0.0
    freq_s: float | None = None
    software: str = ""
    observed: bool = False


class Introduced(Value):
    """A peer names a node that it knows to be alive: how a newcomer learns of the others."""

    node: str
    inc: int
    pid: int
    clock: int = 0
    freq_s: float | None = None
    software: str = ""


class Accused(Value):
    """The node `by` does not hear the subject any more."""

    subject: str
    inc: int
    pid: int
    by: str


class Condemned(Value):
    """The node `by` has given the subject up."""

    subject: str
    inc: int
    pid: int
    by: str
    reason: str = ""


class Viewed(Value):
    """An observer tells whom it knows to be there, of the names above `after` and up to `until`.

    An empty `until` is the end of all names.
    """

    by: str
    after: str
    until: str
    runs: tuple[Introduced, ...]


class Answered(Value):
    """The node answered a ping."""

    node: str


class Probed(Value):
    """What the broker knows of a run of a node: see `brokers.interface.Evidence`."""

    node: str
    inc: int
    pid: int
    evidence: Literal["alive", "gone", "unknown"]


class Strained(Value):
    """Something here is slow, so that others may only seem silent."""

    reason: str


class Observe(Value):
    """Whether heartbeats are heard here from now on, so that silence means something.

    `tells`: others rely on what is heard here, and are sent views.
    """

    on: bool
    tells: bool = False


# ---- effects ---------------------------------------------------------------------------------------


class Joined(Value):
    """A node is a member: see `newcomers.py`. `returned`: it had been taken for lost and speaks again."""

    member: Member
    returned: bool = False


class Left(Value):
    """It stopped in good order."""

    member: Member


class Lost(Value):
    """It is given up; `by` found it, `member.reason` says how."""

    member: Member
    by: str


class Suspected(Value):
    member: Member


class Cleared(Value):
    """A suspect was heard from."""

    member: Member


class Accuse(Value):
    """Broadcast `worker-suspect` about it."""

    member: Member


class Condemn(Value):
    """Broadcast `worker-lost` about it."""

    member: Member


class TellView(Value):
    """Broadcast `worker-view`: see Viewed."""

    after: str
    until: str
    runs: tuple[Introduced, ...]


class Probe(Value):
    """Ask the broker about it, and ping it; answer with Probed and Answered."""

    member: Member
    ping: bool


class Refute(Value):
    """Somebody takes this node for silent: beat at once. `lost`: come online again."""

    lost: bool


class Degraded(Value):
    """More than half of the cluster fell silent at once: rather this node's link, or the broker."""

    suspects: int
    nodes: int


class Restored(Value):
    pass


class Namesake(Value):
    """Another process speaks under this node's name."""

    pid: int
    inc: int


Event = Heard | Introduced | Accused | Condemned | Viewed | Answered | Probed | Strained | Observe
Effect = (
    Joined
    | Left
    | Lost
    | Suspected
    | Cleared
    | Accuse
    | Condemn
    | TellView
    | Probe
    | Refute
    | Degraded
    | Restored
    | Namesake
)
Change = Joined | Left | Lost
