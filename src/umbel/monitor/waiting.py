"""How long the oldest tasks have waited that are known to wait, by queue.

Known are tasks whose `task-sent` was heard, which clients send if they are set to. A task that is not due yet
does not wait.
"""

from umbel.events.state import ClusterState, Tracked
from umbel.protocol.delivery.states import PENDING

LOOKED_AT_MAX = 5_000
KNOWN_S = 24 * 3600.0  # older ones were rather lost track of


def oldest_waiting(state: ClusterState, now: float) -> dict[str, float]:
    """By queue: when the oldest was sent that nobody has taken."""
    oldest: dict[str, float] = {}
    looked_at = 0

    def look(task: Tracked) -> bool:
        nonlocal looked_at
        looked_at += 1
        sent = task.sent
        if task.counted == PENDING and sent is not None and sent.queue is not None and sent.eta is None:
            at = sent.timestamp
            if now - KNOWN_S < at < oldest.get(sent.queue, now):
                oldest[sent.queue] = at
        return looked_at >= LOOKED_AT_MAX

    state.tasks(finished=False, newest_first=False, limit=1, admits=look)
    return oldest
