"""Chords whose parts and body run on both kinds of worker, started by either kind of client.

The parts are counted under keys that three programs write: Celery 5.7, Celery 5.5 and we. Whoever
counts the last one sends the body, so the matrix lets each of them be the last. Those keys are in
Redis whatever the broker is; what differs on RabbitMQ, the sending of the body, is tested in
test_workflows.py.
"""

from collections import Counter
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from tests.interop.conftest import ON_REDIS
from tests.interop.mixed_cluster import Client, MixedCluster, Raised
from tests.waiting import wait_until

pytestmark = ON_REDIS
QUEUES = ("on_umbel", "on_celery", "on_celery55")
BODY = pytest.mark.parametrize("body", QUEUES)


def library(queue: str) -> str:
    return queue.removeprefix("on_").removesuffix("55")


@BODY
@pytest.mark.parametrize("parts", QUEUES)
def test_parts_of_one_kind_have_a_body_of_another(client: Client, parts: str, body: str) -> None:
    found = client(
        "get(chord([add.s(n, n).set(queue=parts) for n in range(5)], where_and.s().set(queue=body))"
        ".apply_async())",
        parts=parts,
        body=body,
    )
    assert found == [library(body), [0, 2, 4, 6, 8]]


@BODY
@pytest.mark.parametrize("last", QUEUES)
def test_the_last_part_is_counted_by_each_kind(client: Client, last: str, body: str, gate: Path) -> None:
    """The part that completes the chord waits until the others have been counted."""
    others = [queue for queue in QUEUES if queue != last]
    task_id, ids = str(uuid4()), [str(uuid4()) for _ in range(4)]
    client(
        "chord([waits_for.s(gate).set(queue=last)] + [echo.s(n).set(queue=others[n % 2], task_id=one)"
        " for n, one in enumerate(ids)], where_and.s().set(queue=body, task_id=task_id)).apply_async().id",
        gate=str(gate),
        last=last,
        others=others,
        body=body,
        ids=ids,
        task_id=task_id,
    )
    assert client("[get(app.AsyncResult(one)) for one in ids]", ids=ids) == [0, 1, 2, 3]
    gate.touch()
    found = client("get(app.AsyncResult(task_id))", task_id=task_id)
    assert found == [library(body), ["done", 0, 1, 2, 3]]


def test_parts_race_on_all_kinds_and_the_body_runs_once(client: Client, tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    found = client(
        "[get(one) for one in [chord([add.s(n, n).set(queue=queues[n % 3]) for n in range(9)],"
        " (total.s().set(queue=queues[c % 3]) | notes.si(journal, c).set(queue=queues[(c + 1) % 3])))"
        ".apply_async() for c in range(12)]]",
        journal=str(journal),
        queues=QUEUES,
    )
    assert found == [None] * 12
    assert Counter(journal.read_text().split()) == {str(chord): 1 for chord in range(12)}


# A part that was counted is delivered once more, to this or another kind of worker, as happens when
# a worker dies between the count and its ack.
# Celery 5.5 knows a counted part by its text alone, so the value is one that can be written in many ways.
VALUE = {"größe": [1.5, 1e22, None, True, "\U0001f40d / \x7f"], "n": {}}
REPEATED = (
    "echo.apply_async((value,), task_id=part_id, queue=again, group_id=group_id, group_index=0,"
    " chord=as_map(echo.s().set(queue=on_celery, task_id=body_id, group_id=group_id)),"
    " link=where.si().set(queue=again, task_id=follow_id)).id"
)


@pytest.mark.parametrize("again", QUEUES)
@pytest.mark.parametrize("first", QUEUES)
def test_a_part_that_is_repeated_counts_once(client: Client, first: str, again: str, gate: Path) -> None:
    names: dict[str, Any] = {name: str(uuid4()) for name in ("part_id", "body_id", "follow_id")}
    names |= {"value": VALUE, "first": first, "again": again, "gate": str(gate)}
    names["group_id"] = client(
        "chord([echo.s(value).set(queue=first, task_id=part_id), waits_for.s(gate).set(queue=on_umbel)],"
        " echo.s().set(queue=on_celery, task_id=body_id)).apply_async().parent.id",
        **names,
    )
    client("get(app.AsyncResult(part_id))", **names)
    client(REPEATED, **names)
    client("[get(app.AsyncResult(follow_id)), get(where.apply_async(queue=again))]", **names)
    gate.touch()
    assert client("get(app.AsyncResult(body_id))", **names) == [VALUE, "done"]


@pytest.mark.parametrize("again", QUEUES)
@pytest.mark.parametrize("last", QUEUES)
def test_a_part_that_is_repeated_after_the_end_sends_no_second_body(
    client: Client, last: str, again: str, tmp_path: Path
) -> None:
    journal = tmp_path / "journal"
    names: dict[str, Any] = {name: str(uuid4()) for name in ("part_id", "body_id", "follow_id")}
    names |= {"value": VALUE, "last": last, "again": again, "journal": str(journal)}
    names["group_id"] = client(
        "chord([echo.s(value).set(queue=last, task_id=part_id)],"
        " notes.si(journal, 'ran').set(queue=on_celery, task_id=body_id)).apply_async().parent.id",
        **names,
    )
    client("get(app.AsyncResult(body_id))", **names)
    client(REPEATED.replace("echo.s()", "notes.si(journal, 'ran')"), **names)
    client("[get(app.AsyncResult(follow_id)), get(where.apply_async(queue=again))]", **names)
    client("get(where.apply_async(queue=on_celery))")  # which runs one after another
    assert journal.read_text() == "ran\n"


@BODY
def test_a_body_knows_its_message(client: Client, body: str) -> None:
    seen = client(
        "get(chord([echo.s(1).set(queue=on_umbel), echo.s(2).set(queue=on_celery)],"
        " about_itself.s().set(queue=body)).apply_async())",
        body=body,
    )
    assert seen["group"]
    assert seen["index"] is None
    assert seen["parent"] != seen["id"]


@BODY
@pytest.mark.parametrize("failing", QUEUES)
def test_a_part_that_fails_fails_the_body(client: Client, failing: str, body: str, tmp_path: Path) -> None:
    others = [queue for queue in QUEUES if queue != failing]
    part_id, journal = str(uuid4()), tmp_path / "journal"
    with pytest.raises(Raised) as caught:
        client(
            "get_own(chord([add.s(1, 1).set(queue=others[0]), fails.s().set(queue=failing, task_id=part_id),"
            " add.s(2, 2).set(queue=others[1])], notes.si(journal, 'ran').set(queue=body)).apply_async())",
            others=others,
            failing=failing,
            body=body,
            part_id=part_id,
            journal=str(journal),
        )
    assert (caught.value.kind, caught.value.is_known) == ("ChordError", True)
    assert part_id in str(caught.value)
    assert not journal.exists()


@pytest.mark.parametrize("failing", ["on_umbel", "on_celery"])
def test_a_part_that_fails_fails_all_steps_of_a_body_of_ours(cluster: MixedCluster, failing: str) -> None:
    """Celery 5.5 fails the first one alone."""
    with pytest.raises(Raised) as caught:
        cluster.client("umbel")(
            "get_own(chord([add.s(1, 1).set(queue=failing), fails.s().set(queue=failing)],"
            " total.s().set(queue=on_umbel) | echo.s().set(queue=on_celery)).apply_async())",
            failing=failing,
        )
    assert caught.value.kind == "ChordError"


@pytest.mark.parametrize("failing", QUEUES)
def test_the_errback_of_a_body_is_sent(client: Client, failing: str) -> None:
    body_id, errback_id = str(uuid4()), str(uuid4())
    client(
        "chord([add.s(1, 1).set(queue=on_umbel), fails.s().set(queue=failing)],"
        " total.s().set(queue=on_celery, task_id=body_id,"
        " link_error=[sees_failure.s().set(queue=on_umbel, task_id=errback_id)])).apply_async().id",
        failing=failing,
        body_id=body_id,
        errback_id=errback_id,
    )
    assert client("get(app.AsyncResult(errback_id))", errback_id=errback_id) == ["umbel", body_id]


@BODY
def test_a_chord_inside_a_chain_hands_on(client: Client, body: str) -> None:
    found = client(
        "get((add.s(1, 1).set(queue=on_celery)"
        " | group([add.s(10).set(queue=on_umbel), add.s(20).set(queue=on_celery)])"
        " | total.s().set(queue=body) | where_and.s().set(queue=on_umbel)).apply_async())",
        body=body,
    )
    assert found == ["umbel", 34]


@BODY
def test_a_chain_may_be_a_part(client: Client, body: str) -> None:
    found = client(
        "get(chord([add.s(1, 1).set(queue=on_umbel) | add.s(10).set(queue=on_celery),"
        " add.s(2, 2).set(queue=on_celery) | add.s(20).set(queue=on_umbel), echo.s(5).set(queue=on_umbel)],"
        " echo.s().set(queue=body)).apply_async())",
        body=body,
    )
    assert found == [12, 24, 5]


@pytest.mark.parametrize("failing", QUEUES)
def test_a_chain_that_breaks_as_a_part_fails_the_body(client: Client, failing: str) -> None:
    with pytest.raises(Raised) as caught:
        client(
            "get_own(chord([fails.s().set(queue=failing) | echo.s().set(queue=on_umbel),"
            " echo.s(5).set(queue=on_celery)], total.s().set(queue=on_umbel)).apply_async())",
            failing=failing,
        )
    assert (caught.value.kind, caught.value.is_known) == ("ChordError", True)


@BODY
def test_a_chord_may_be_a_part_of_a_chord(client: Client, body: str) -> None:
    inner = (
        "chord([echo.s(1).set(queue=on_umbel), echo.s(2).set(queue=on_celery)], total.s().set(queue=inside))"
    )
    for inside in QUEUES:
        found = client(
            f"get(chord([{inner}, echo.s(10).set(queue=on_umbel)], total.s().set(queue=body)).apply_async())",
            body=body,
            inside=inside,
        )
        assert found == 13


@BODY
def test_the_body_may_be_a_group(client: Client, body: str) -> None:
    found = client(
        "get((group([echo.s(1).set(queue=on_umbel), echo.s(2).set(queue=on_celery)])"
        " | total.s().set(queue=body)"
        " | group([add.s(10).set(queue=on_umbel), add.s(20).set(queue=on_celery)])).apply_async())",
        body=body,
    )
    assert found == [13, 23]


@BODY
def test_a_retried_part_is_counted_once(client: Client, body: str) -> None:
    found = client(
        "get(chord([flaky.s(2).set(queue=q) for q in (on_umbel, on_celery, on_celery55)],"
        " echo.s().set(queue=body)).apply_async())",
        body=body,
    )
    assert found == [[library(queue), 2, True] for queue in QUEUES]


@BODY
@pytest.mark.parametrize("adding", ["on_umbel", "on_celery"])
def test_a_part_is_added_to_a_running_chord(client: Client, adding: str, body: str) -> None:
    for queue in QUEUES:
        found = client(
            "get(chord([brings_another.s(queue).set(queue=adding), echo.s(10).set(queue=on_umbel)],"
            " total.s().set(queue=body)).apply_async())",
            queue=queue,
            adding=adding,
            body=body,
        )
        assert found == 111


@pytest.mark.parametrize("last", QUEUES)
def test_a_part_that_ends_in_a_group_is_a_list(client: Client, last: str, gate: Path) -> None:
    """Whoever counts the last part knows from the store which belong together."""
    others = [queue for queue in QUEUES if queue != last]
    task_id, ids = str(uuid4()), [str(uuid4()) for _ in range(2)]
    client(
        "chord([echo.s(42).set(queue=others[0]) | group([echo.s().set(queue=others[0], task_id=ids[0]),"
        " echo.s().set(queue=others[1], task_id=ids[1])]), waits_for.s(gate).set(queue=last)],"
        " echo.s().set(queue=on_celery, task_id=task_id)).apply_async().id",
        gate=str(gate),
        last=last,
        others=others,
        ids=ids,
        task_id=task_id,
    )
    assert client("[get(app.AsyncResult(one)) for one in ids]", ids=ids) == [42, 42]
    gate.touch()
    assert client("get(app.AsyncResult(task_id))", task_id=task_id) == [[42, 42], "done"]


def test_a_chord_without_parts_still_has_its_body(client: Client) -> None:
    for body in ("on_umbel", "on_celery"):
        assert client("get(chord([], total.s().set(queue=body)).apply_async())", body=body) == 0


def test_a_part_that_a_worker_of_ours_refuses_fails_the_body(client: Client) -> None:
    unknown = "app.signature('nobody.knows').set(queue=on_umbel)"
    with pytest.raises(Raised) as caught:
        client(
            f"get_own(chord([echo.s(1).set(queue=on_celery), {unknown}], total.s().set(queue=on_celery))"
            ".apply_async())"
        )
    assert caught.value.kind == "ChordError"


def test_nothing_of_a_chord_stays_behind(cluster: MixedCluster, client: Client) -> None:
    group_id = client(
        "(lambda result: [get(result), result.parent.id])"
        "(chord([echo.s(1).set(queue=on_umbel), echo.s(2).set(queue=on_celery)],"
        " total.s().set(queue=on_umbel)).apply_async())"
    )[1]
    keys = "app.backend.client.keys('celery-taskset-meta-' + group_id + '*')"
    wait_until(
        lambda: (
            cluster.client("celery")(f"[key.decode()[-2:] for key in {keys}]", group_id=group_id) == [".c"]
        ),
        what="the keys of the chord to go",
    )
