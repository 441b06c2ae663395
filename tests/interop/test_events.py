"""`umbel events` on Redis and RabbitMQ shows what workers of both kinds tell (L7)."""

from pathlib import Path

from tests.events_tail import EventsTail
from tests.interop.conftest import WAYS
from tests.interop.mixed_cluster import MixedCluster


def test_events_of_either_kind_of_worker_are_shown_in_order(cluster: MixedCluster, tmp_path: Path) -> None:
    """A monitor listens once it hears somebody's heartbeat."""
    with EventsTail(tmp_path, cluster.broker, "--window", "1", "--enable") as tail:
        tail.wait_for("a heartbeat", type="worker-heartbeat")
        for library, queue in WAYS.values():
            send = "get(add.apply_async((2, 2), queue=queue, task_id=queue))"
            assert cluster.client(library)(send, queue=queue) == 4
        for _, queue in WAYS.values():
            tail.wait_for("the end of the task", type="task-succeeded", uuid=queue)
        assert tail.stop() == 0
        shown = tail.seen()
    assert [one["order"] for one in shown] == sorted(one["order"] for one in shown)
    for _, queue in WAYS.values():
        told = [one for one in shown if one.get("uuid") == queue]
        assert [one["type"] for one in told] == ["task-received", "task-started", "task-succeeded"]
        assert {one["hostname"].partition("@")[0] for one in told} == {queue.removeprefix("on_")}
