"""What a worker could take, by the depths of its queues."""

from umbel.brokers.interface import Depth, ready_for


def test_what_waits_in_a_paused_or_foreign_queue_is_not_for_a_worker() -> None:
    """Or its watchdog would take it for stalled, and its autoscaler grow its pool in vain."""
    depths = {
        "mine": Depth(3, 5, 7),
        "resting": Depth(100, 0, 0, paused=True),
        "foreign": Depth(50, 0, 0),
    }
    assert ready_for(["mine", "resting", "empty"], depths) == 3
