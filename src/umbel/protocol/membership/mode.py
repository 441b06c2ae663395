"""GossipMode: whether every node hears every heartbeat, or three observers do it for all.

In a small cluster everybody listens to everybody: the simplest, and nobody is needed for it. The
cost of that grows with the square of the number of nodes, so above 40 nodes only the holders of
the leases `observer-0` to `observer-2` hear heartbeats, and tell the others who is lost. Between 33
and 40 the mode stays as it is, so that one node more or less does not turn it back and forth.
"""

from collections.abc import Sequence
from enum import StrEnum
from hashlib import sha256

from umbel.protocol.membership.suspicion import OBSERVERS

FULL_MAX = 32
OBSERVED_MIN = 41
ANSWERERS = 3
CANDIDATES = 8
OBSERVER_LEASES = tuple(f"observer-{number}" for number in range(OBSERVERS))


class GossipMode(StrEnum):
    AUTO = "auto"
    FULL = "full"
    OBSERVED = "observed"


def mode_for(setting: GossipMode, current: GossipMode, nodes: int) -> GossipMode:
    if setting is not GossipMode.AUTO:
        return setting
    if nodes <= FULL_MAX:
        return GossipMode.FULL
    return GossipMode.OBSERVED if nodes >= OBSERVED_MIN else current


def patterns_for(mode: GossipMode, *, observer: bool) -> tuple[str, ...]:
    """The routing keys to listen to. What is rare is heard by all, heartbeats by whoever must."""
    if mode is GossipMode.FULL:
        return ("worker.#",)
    rare = (
        "worker.online",
        "worker.offline",
        "worker.suspect",
        "worker.lost",
        "worker.elected",
        "worker.leader",
        "worker.elect",
        "worker.elect.ack",
        "worker.view",
    )
    return (*rare, "worker.heartbeat") if observer else rare


def is_among_lowest(text: str, node: str, nodes: Sequence[str], count: int) -> bool:
    """Whether the node is one of the `count` that everybody would choose for the text.

    Nodes that see the same members choose the same; where views differ a few more or fewer do.
    """
    mine = _score(text, node)
    return sum(1 for other in nodes if other != node and _score(text, other) < mine) < count


def _score(text: str, node: str) -> bytes:
    return sha256(f"{text}\0{node}".encode(errors="replace")).digest()[:8]
