"""The classic election's messages, as Celery's workers send and read them.

`election_v1.py` runs the classic algorithm; `election_mixed.py` takes part in it only as far as a
cluster with Celery workers needs. Names are of nodes (`name@host`); a candidate is told apart by
its clock and, where clocks are equal, by the text `name@host.pid`.
"""

from dataclasses import dataclass

from umbel.protocol.value import Value

NAME_BYTES_MAX = 128
ACTION_BYTES_MAX = 1 << 20
CLOCK_MAX = 2**53 - 1


@dataclass(frozen=True, slots=True, order=True)
class Candidate:
    """One who stands for election; the lowest leads."""

    clock: int
    name: str  # name@host.pid


# ---- events ----------------------------------------------------------------------------------------


class Called(Value):
    """The control command `election` came in its old form: nothing but id, topic and action."""

    election_id: str
    topic: str
    action: bytes  # JSON


class ElectHeard(Value):
    """A `worker-elect` event, perhaps our own. `version` is its `cver`; what has none is of version 1."""

    election_id: str
    topic: str
    action: bytes
    node: str
    pid: int
    clock: int
    version: int

    @property
    def candidate(self) -> Candidate:
        return Candidate(self.clock, f"{self.node}.{self.pid}")


class AckHeard(Value):
    """A `worker-elect-ack` event, perhaps our own. Ours say whom they know as the lowest."""

    election_id: str
    node: str
    lowest: Candidate | None = None


# ---- effects ---------------------------------------------------------------------------------------


class PublishElect(Value):
    """Broadcast `worker-elect`. `clock` None: stamped as every event is."""

    election_id: str
    topic: str
    action: bytes
    clock: int | None = None


class PublishAck(Value):
    """Broadcast `worker-elect-ack`."""

    election_id: str
    lowest: Candidate | None = None


def is_sound(election_id: str, topic: str, action: bytes) -> bool:
    """Whether an election's names and weight are such as a table may keep."""
    try:
        sizes = len(election_id.encode()), len(topic.encode())
    except UnicodeEncodeError:  # half a surrogate pair
        return False
    return all(0 < size <= NAME_BYTES_MAX for size in sizes) and len(action) <= ACTION_BYTES_MAX
