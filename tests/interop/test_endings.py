"""How a task ends that does not simply return: errors, retries, expiry, revokes, limits, callbacks."""

import itertools
from pathlib import Path
from socket import gethostname
from uuid import uuid4

import pytest

from tests.interop.conftest import Way
from tests.interop.mixed_cluster import Client, MixedCluster, Raised
from tests.waiting import wait_until

# The class a client gets, in the library of that client.
NAMES = {
    "revoked": {"celery": "TaskRevokedError", "umbel": "TaskRevoked"},
    "gave up": {"celery": "MaxRetriesExceededError", "umbel": "MaxRetriesExceeded"},
}
HOMES = {"celery": ("celery.exceptions", "billiard.exceptions"), "umbel": ("umbel.errors",)}


def is_of(raised: Raised, client: Client, name: str) -> bool:
    return raised.kind == name and raised.module in HOMES[client.library] and raised.is_known


# ---- errors ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("task", "kind", "module", "given"),
    [
        ("fails", "ValueError", "builtins", ["boom", 42]),
        ("breaks", "Broken", "shared_tasks", ["of our own", {"why": ["this", None]}]),
    ],
)
def test_an_error_keeps_its_class_and_arguments(
    way: Way, task: str, kind: str, module: str, given: list[object]
) -> None:
    with pytest.raises(Raised) as caught:
        way(f"get({task}.apply_async(queue=queue))")
    assert (caught.value.kind, caught.value.module, caught.value.given) == (kind, module, given)


def test_a_failed_task_shows_state_and_traceback(way: Way) -> None:
    task_id = way("fails.apply_async(queue=queue).id")
    found = way("get(app.AsyncResult(task_id), propagate=False)", task_id=task_id)
    assert found == "('boom', 42)"
    state, traceback = way(
        "(lambda result: [result.state, result.traceback])(app.AsyncResult(task_id))", task_id=task_id
    )
    assert state == "FAILURE"
    assert traceback.startswith("Traceback (most recent call last)")
    assert "in fails" in traceback
    assert "ValueError: ('boom', 42)" in traceback


@pytest.mark.parametrize("task", ["is_odd", "fails_with_an_object", "returns_an_object"])
def test_an_error_that_cannot_travel_still_ends_the_task(way: Way, task: str) -> None:
    with pytest.raises(Raised):
        way(f"get({task}.apply_async(queue=queue))")


def test_a_call_that_does_not_fit_fails_with_type_error(way: Way) -> None:
    with pytest.raises(Raised, match="TypeError"):
        way("get(app.send_task('shared_tasks.total', [1, 2, 3], queue=queue))")


def test_an_unknown_task_fails_at_its_sender(way: Way) -> None:
    with pytest.raises(Raised, match=r"nobody\.knows") as caught:
        way("get(app.send_task('nobody.knows', queue=queue))")
    assert is_of(caught.value, way.client, "NotRegistered")


# ---- time limits -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "name"), [("time_limit", "TimeLimitExceeded"), ("soft_time_limit", "SoftTimeLimitExceeded")]
)
def test_a_time_limit_in_the_message_is_kept(way: Way, option: str, name: str) -> None:
    with pytest.raises(Raised) as caught:
        way(f"get(takes_long.apply_async(queue=queue, {option}=1))")
    assert is_of(caught.value, way.client, name)


# ---- retries ---------------------------------------------------------------------------------------


def test_a_task_is_tried_again_there_until_it_works(way: Way) -> None:
    assert way("get(flaky.apply_async((3,), queue=queue))") == [way.worker, 3, True]
    assert way("get(retries_by_itself.apply_async(queue=queue))") == 2


def test_the_last_retry_raises_the_error_of_the_task(way: Way) -> None:
    with pytest.raises(Raised, match="again") as caught:
        way("get(never_works.apply_async(queue=queue))")
    assert (caught.value.kind, caught.value.module) == ("Broken", "shared_tasks")


def test_a_retry_too_many_without_an_error_says_so(way: Way) -> None:
    with pytest.raises(Raised) as caught:
        way("get(gives_up.apply_async(queue=queue))")
    assert is_of(caught.value, way.client, NAMES["gave up"][way.client.library])


def test_a_retry_by_celery_is_run_by_us(client: Client) -> None:
    found = client("get(runs_only_on.apply_async(('umbel', on_umbel), queue=on_celery))")
    assert found == ["umbel", 1]


# ---- expiry and revokes ----------------------------------------------------------------------------


def test_a_task_that_expires_before_it_is_due_is_not_run(way: Way, tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    with pytest.raises(Raised, match="expired") as caught:
        way(
            "get(notes.apply_async((journal, 'ran'), queue=queue, countdown=0.6, expires=0.2))",
            journal=str(journal),
        )
    assert is_of(caught.value, way.client, NAMES["revoked"][way.client.library])
    assert not journal.exists()


def test_a_task_that_has_not_expired_runs(way: Way) -> None:
    assert way("get(add.apply_async((1, 1), queue=queue, expires=60))") == 2
    moment = "datetime.now(UTC) + timedelta(seconds=60)"
    assert way(f"get(add.apply_async((1, 1), queue=queue, expires={moment}))") == 2


@pytest.mark.parametrize("sender", ["celery", "umbel"])
def test_our_revoke_holds_for_whoever_sent_the_task(
    cluster: MixedCluster, sender: str, tmp_path: Path
) -> None:
    """The durable revoke stops tasks on our workers; Celery's own, by pidbox, is a later chapter."""
    journal, task_id = tmp_path / "journal", str(uuid4())
    client = cluster.client(sender)
    client(
        "notes.apply_async((journal, 'ran'), queue=on_umbel, countdown=0.8, task_id=task_id).id",
        journal=str(journal),
        task_id=task_id,
    )
    cluster.client("umbel")("app.AsyncResult(task_id).revoke()", task_id=task_id)
    with pytest.raises(Raised, match="revoked") as caught:
        client("get(app.AsyncResult(task_id))", task_id=task_id)
    assert is_of(caught.value, client, NAMES["revoked"][sender])
    assert client("app.AsyncResult(task_id).state", task_id=task_id) == "REVOKED"
    assert not journal.exists()


# ---- callbacks and errbacks ------------------------------------------------------------------------


def back_from(way: Way) -> str:
    return "on_celery" if way.worker == "umbel" else "on_umbel"


def test_a_callback_gets_the_result_on_the_other_kind_of_worker(way: Way) -> None:
    first, second = str(uuid4()), str(uuid4())
    way(
        "add.apply_async((1, 1), queue=queue, link=["
        "  where_and.s().set(queue=back, task_id=first), where_and.s().set(queue=queue, task_id=second)]).id",
        back=back_from(way),
        first=first,
        second=second,
    )
    assert way("get(app.AsyncResult(first))", first=first) == [back_from(way).removeprefix("on_"), 2]
    assert way("get(app.AsyncResult(second))", second=second) == [way.worker, 2]


def test_an_errback_is_sent_the_id_of_what_failed(way: Way) -> None:
    task_id, errback_id = str(uuid4()), str(uuid4())
    way(
        "fails.apply_async(queue=queue, task_id=task_id,"
        "  link_error=sees_failure.s().set(queue=back, task_id=errback_id)).id",
        back=back_from(way),
        task_id=task_id,
        errback_id=errback_id,
    )
    seen = way("get(app.AsyncResult(errback_id))", errback_id=errback_id)
    assert seen == [back_from(way).removeprefix("on_"), task_id]


def test_an_errback_that_takes_the_error_is_called_where_it_failed(way: Way, tmp_path: Path) -> None:
    task_id, file = str(uuid4()), tmp_path / "heard"
    way(
        "fails.apply_async(queue=queue, task_id=task_id, link_error=hears_error.s(file)).id",
        task_id=task_id,
        file=str(file),
    )
    heard = wait_until(lambda: file.exists() and file.read_text(), what="the errback")
    assert heard == f"{way.worker} {task_id} ValueError True"


# ---- priorities ------------------------------------------------------------------------------------

SENT = [9, 4, 0, 7, 1, 5, 8, 3]
# On Redis both read the same four lists, 0 first. RabbitMQ orders nothing in a queue that was made
# without x-max-priority, as Celery makes them; there a worker of ours orders what it has fetched.
RAN = {
    ("redis", "umbel"): [0, 1, 4, 5, 3, 7, 8, 9],
    ("redis", "celery"): [0, 1, 4, 5, 3, 7, 8, 9],
    ("rabbitmq", "umbel"): [9, 8, 7, 5, 4, 3, 1, 0],
    ("rabbitmq", "celery"): SENT,
}


def test_urgent_messages_go_first(way: Way, cluster: MixedCluster, tmp_path: Path) -> None:
    rounds = itertools.count()

    def ran() -> list[int]:
        return _in_the_order_they_ran(way, cluster, tmp_path / f"journal-{next(rounds)}")

    # A worker that a loaded machine stops for 0.3 s returns messages to RabbitMQ, where nothing orders them.
    wait_until(lambda: ran() == RAN[cluster.name, way.worker], what="the most urgent first")


def _in_the_order_they_ran(way: Way, cluster: MixedCluster, journal: Path) -> list[int]:
    queue = f"priorities-{way.worker}-{journal.name}"
    way(
        "[notes.apply_async((journal, one), queue=waiting, priority=one).id for one in sent]",
        journal=str(journal),
        waiting=queue,
        sent=SENT,
    )
    names = {"waiting": queue, "node": f"celery@{gethostname()}"}
    celery, worker = cluster.client("celery"), f"in-order-{journal.name}"
    if way.worker == "umbel":
        cluster.ours.start_worker(worker, "-P", "solo", "-Q", queue)
    else:
        celery("app.control.add_consumer(waiting, destination=[node], reply=True, limit=1)", **names)
    wait_until(
        lambda: journal.exists() and len(journal.read_text().split()) == len(SENT),
        what="all of them to run",
    )
    if way.worker == "umbel":
        assert cluster.ours.stop_worker(worker) == 0
    else:
        celery("app.control.cancel_consumer(waiting, destination=[node], reply=True, limit=1)", **names)
    return [int(line) for line in journal.read_text().split()]
