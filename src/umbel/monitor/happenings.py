"""Happenings: what changed who is there or who leads, in words; heard just now or read from the lake."""

from collections.abc import Mapping

from umbel.monitor.shapes import Happening, NodeState

STATES: Mapping[str, NodeState] = {
    "joined": "alive",
    "returned": "alive",
    "alive": "alive",
    "suspect": "suspect",
    "lost": "lost",
    "left": "left",
}
"""What a node is after each kind of change; the other kinds change no node."""


def lease_changed(name: str, holder: str, term: int, at: float) -> Happening:
    """`holder`: the node that has it from then on; "": nobody."""
    text = f"{name} is held by {holder}" if holder else f"{name} is free"
    return Happening(at=at, kind="lease", subject=name, text=text, node=holder, term=term)


def version_changed(node: str, old: str, new: str, at: float) -> Happening:
    return Happening(at=at, kind="version", subject=node, text=f"{node}: {old} → {new}", node=node)


def elected(election_id: str, topic: str, node: str, term: int, at: float) -> Happening:
    text = f"{node} was elected" + (f" for {topic}" if topic else "")
    return Happening(at=at, kind="elected", subject=election_id, text=text, node=node, term=term)
