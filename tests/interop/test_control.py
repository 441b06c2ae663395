"""Remote control between both worlds: clients of either kind ask workers of both (P3).

The same request goes to a worker of ours and to one of Celery 5.7, and what both answer is compared:
word for word where the answer is fixed, by its form where it holds facts of the worker.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from tests.interop.mixed_cluster import Client, MixedCluster
from tests.waiting import wait_until
from umbel.launch.preparation import node_name

OURS, THEIRS = node_name("umbel"), node_name("celery")
TIMEOUT_S = 20
ADD = "shared_tasks.add"


def tell(client: Client, command: str, *nodes: str, **arguments: Any) -> dict[str, Any]:
    """The replies of these nodes, of both if none is named, asked by a client of either library."""
    replies = client(
        "app.control.broadcast(command, arguments, destination=nodes, reply=True, timeout=timeout)",
        command=command,
        arguments=arguments,
        nodes=list(nodes) or [OURS, THEIRS],
        timeout=TIMEOUT_S,
    )
    found = {node: value for reply in replies for node, value in reply.items()}
    assert set(found) == set(nodes or (OURS, THEIRS))
    return found


def form(value: Any) -> Any:
    """Names and types: what two workers have in common when they say the same of themselves."""
    if isinstance(value, dict):
        return {name: form(inside) for name, inside in value.items()}
    if isinstance(value, list):
        return [form(value[0])] if value else []
    return type(value).__name__


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        ("ping", {}),
        ("revoked", {}),
        ("reserved", {}),
        ("active", {}),
        ("scheduled", {}),
        ("dump_active", {"safe": True}),
        ("query_task", {"ids": ["nobody's"]}),
        ("query_task", {"ids": "nobody's"}),
        ("rate_limit", {"task_name": ADD, "rate_limit": "100/m"}),
        ("rate_limit", {"task_name": ADD, "rate_limit": 0}),
        ("rate_limit", {"task_name": "no.such", "rate_limit": "1/s"}),
        ("time_limit", {"task_name": ADD, "hard": 100.0, "soft": 50.0}),
        ("time_limit", {"task_name": ADD, "hard": None, "soft": None}),
        ("time_limit", {"task_name": "no.such", "hard": 1.0}),
        ("disable_events", {}),  # both run with -E
        ("enable_events", {}),
        ("heartbeat", {}),
        ("add_consumer", {"queue": "added"}),
        ("cancel_consumer", {"queue": "added"}),
        ("terminate", {"signal": "KILL", "task_id": ["nobody's"]}),
        ("revoke", {"task_id": ["nobody's"], "terminate": True, "signal": "TERM"}),
        ("revoke", {"task_id": "only-one"}),
        ("pool_grow", {"n": 1}),
        ("pool_shrink", {"n": 1}),
        ("autoscale", {"max": 3, "min": 1}),
        ("pool_restart", {"modules": []}),
        ("nosuchcommand", {}),
        ("revoke_by_stamped_headers", {"headers": {"header": "value"}}),
        ("revoke_by_stamped_headers", {"headers": {"header": "value"}, "terminate": True}),
    ],
)
def test_both_answer_the_same(client: Client, command: str, arguments: dict[str, Any]) -> None:
    replies = tell(client, command, **arguments)
    if command == "revoked":  # two revokes that cross each other are heard in either order
        replies = {node: sorted(ids) for node, ids in replies.items()}
    assert replies[OURS] == replies[THEIRS]


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        ("clock", {}),
        ("registered", {}),
        ("registered", {"taskinfoitems": ["rate_limit"]}),
        ("active_queues", {}),
        ("report", {}),
        ("memdump", {}),
        ("report", {"unknown": 1}),
        ("rate_limit", {}),
    ],
)
def test_both_answer_in_the_same_form(client: Client, command: str, arguments: dict[str, Any]) -> None:
    replies = tell(client, command, **arguments)
    assert form(replies[OURS]) == form(replies[THEIRS])


@pytest.mark.parametrize("revoked", [[], ["by-hello"], {"old-form": [890.8, "old-form"]}])
def test_both_answer_hello(client: Client, revoked: Any) -> None:
    """Ours says more, which Celery does not read."""
    replies = tell(client, "hello", from_node="someone@else", revoked=revoked)
    ours, theirs = form(replies[OURS]), form(replies[THEIRS])
    assert theirs.items() <= ours.items()
    assert set(revoked) <= set(replies[OURS]["revoked"])


def test_registered_tasks_are_shown_as_celery_shows_them(client: Client) -> None:
    tell(client, "rate_limit", task_name=ADD, rate_limit="10/s")
    for items in ([], ["rate_limit"], ["nothing"]):
        replies = tell(client, "registered", taskinfoitems=items)
        assert sorted(replies[OURS]) == sorted(replies[THEIRS])
        assert (f"{ADD} [rate_limit=10/s]" in replies[OURS]) is (items != ["nothing"])
    tell(client, "rate_limit", task_name=ADD, rate_limit=0)


def test_statistics_have_every_field_of_celerys(client: Client) -> None:
    replies = tell(client, "stats")
    ours, theirs = form(replies[OURS]), form(replies[THEIRS])
    assert set(theirs) <= set(ours)
    for part in ("pool", "broker"):
        assert set(theirs[part]) <= set(ours[part])
    same = ("pid", "clock", "uptime", "prefetch_count", "rusage")
    assert [ours[name] for name in same] == [theirs[name] for name in same]
    assert ours["pool"]["writes"] == theirs["pool"]["writes"]
    brokers = [dict(replies[node]["broker"], heartbeat=0, connect_timeout=0) for node in (OURS, THEIRS)]
    assert brokers[0] == brokers[1]


@contextmanager
def running(client: Client, queue: str, gate: Path) -> Iterator[str]:
    """A task that runs on the workers of a queue until the block ends."""
    task_id = str(uuid4())
    sent = "waits_for.apply_async((gate,), queue=queue, task_id=task_id).id"
    client(sent, gate=str(gate), queue=queue, task_id=task_id)
    node = OURS if queue == "on_umbel" else THEIRS
    wait_until(
        lambda: [one["id"] for one in tell(client, "active", node)[node]] == [task_id],
        what=f"{node} to run the task",
    )
    yield task_id
    gate.touch()


def test_what_runs_is_shown_as_celery_shows_it(client: Client, tmp_path: Path) -> None:
    with (
        running(client, "on_umbel", tmp_path / "one") as ours,
        running(client, "on_celery", tmp_path / "two") as theirs,
    ):
        for arguments in ({}, {"safe": True}):
            replies = tell(client, "active", **arguments)
            shown = {node: replies[node][0] for node in (OURS, THEIRS)}
            assert (shown[OURS]["id"], shown[THEIRS]["id"]) == (ours, theirs)
            assert set(shown[OURS]) == set(shown[THEIRS])
            assert set(shown[OURS]["delivery_info"]) == set(shown[THEIRS]["delivery_info"])
            assert form(shown[OURS]["time_start"]) == form(shown[THEIRS]["time_start"]) == "float"
        found = tell(client, "query_task", ids=[ours, theirs])
        assert found[OURS][ours][0] == found[THEIRS][theirs][0] == "active"
    for task_id in (ours, theirs):
        assert client("get(app.AsyncResult(task_id))", task_id=task_id) == "done"


def test_a_running_task_is_terminated_on_either_side(client: Client, tmp_path: Path) -> None:
    with (
        running(client, "on_umbel", tmp_path / "one") as ours,
        running(client, "on_celery", tmp_path / "two") as theirs,
    ):
        client("app.control.revoke([ours, theirs], terminate=True)", ours=ours, theirs=theirs)
        states = "sorted({app.AsyncResult(one).state for one in (ours, theirs)})"
        wait_until(lambda: client(states, ours=ours, theirs=theirs) == ["REVOKED"], what="both to be revoked")


def test_a_task_that_is_not_due_is_shown_by_who_found_it(cluster: MixedCluster) -> None:
    client = cluster.client("celery")
    sent = "add.apply_async((1, 2), queue=queue, countdown=3600, task_id=task_id).id"
    ours, theirs = str(uuid4()), str(uuid4())
    for queue, task_id in (("on_umbel", ours), ("on_celery", theirs)):
        client(sent, queue=queue, task_id=task_id)

    def both() -> dict[str, Any] | None:
        replies = tell(client, "scheduled")
        return replies if replies[OURS] and replies[THEIRS] else None

    replies = wait_until(both, what="both to have found theirs")
    assert [replies[node][0]["request"]["id"] for node in (OURS, THEIRS)] == [ours, theirs]
    shown = [form({**replies[node][0], "request": {}}) for node in (OURS, THEIRS)]
    assert shown[0] == shown[1]
    client("app.control.revoke([ours, theirs])", ours=ours, theirs=theirs)


def test_revoking_reaches_both_kinds_of_workers(client: Client) -> None:
    task_id = str(uuid4())
    client("app.control.revoke(task_id)", task_id=task_id)

    def known() -> bool:
        return all(task_id in ids for ids in tell(client, "revoked").values())

    wait_until(known, what="both to know")
