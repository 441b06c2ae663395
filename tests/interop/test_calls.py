"""One call: sent by a client of one kind, run by a worker of the other, its result read back."""

from pathlib import Path
from uuid import uuid4

import pytest

from tests.interop.conftest import Way
from tests.waiting import wait_until


def test_a_task_runs_there_and_its_result_comes_back(way: Way) -> None:
    assert way("get(where.apply_async(queue=queue))") == way.worker
    assert way("get(add.apply_async((2,), {'y': 3}, queue=queue))") == 5
    assert way("get(app.send_task('shared_tasks.add', [20], {'y': 22}, queue=queue))") == 42


def test_results_of_many_calls_come_back(way: Way) -> None:
    expression = "[get(one) for one in [add.apply_async((n, n), queue=queue) for n in range(50)]]"
    assert way(expression) == [2 * n for n in range(50)]


@pytest.mark.parametrize(
    "value",
    [
        "datetime(2026, 1, 2, 3, 4, 5, 678, tzinfo=UTC)",
        "datetime(2026, 1, 2, 3, 4, 5)",
        "date(2026, 1, 2)",
        "time(3, 4, 5)",
        "Decimal('1.50')",
        "UUID(int=5)",
        "b'text'",
        "b'\\xff\\xfe\\x00'",
        "{'deep': [{'when': date(2026, 1, 2), 'none': None}, [Decimal('0.1'), b'x']]}",
        "'Zoë \\U0001f40d \\x00 \"quoted\"'",
        "2 ** 63 - 1",
        "-1.5e300",
        "[]",
        "{}",
    ],
)
def test_a_value_arrives_as_what_it_was(way: Way, value: str) -> None:
    # In the client: what was sent, run through both worlds, is equal and of the same type.
    sent = f"echo.apply_async(({value},), queue=queue)"
    assert way(f"(lambda found: [found == {value}, type(found) is type({value})])(get({sent}))") == [True] * 2


@pytest.mark.parametrize("compression", ["gzip", "zlib", "bzip2", "lzma"])
def test_compressed_messages_are_read(way: Way, compression: str) -> None:
    sent = "echo.apply_async(('long ' * 1000,), queue=queue, compression=compression)"
    assert way(f"get({sent})", compression=compression) == "long " * 1000


def test_custom_headers_reach_the_task(way: Way) -> None:
    sent = "header.apply_async(('tenant',), queue=queue, headers={'tenant': 'blue', 'other': [1, None]})"
    assert way(f"get({sent})") == "blue"


def test_a_task_knows_its_own_message(way: Way) -> None:
    task_id = str(uuid4())
    seen = way("get(about_itself.apply_async(queue=queue, task_id=task_id))", task_id=task_id)
    assert seen == {
        "id": task_id,
        "root": task_id,
        "parent": None,
        "group": None,
        "index": None,
        "retries": 0,
        "queue": way.queue,
        "library": way.worker,
    }


def test_a_task_sends_another_to_the_other_kind_of_worker(way: Way) -> None:
    back = "on_celery" if way.worker == "umbel" else "on_umbel"
    parent, child = way("get(sends.apply_async((back,), queue=queue))", back=back)
    seen = way("get(app.AsyncResult(child))", child=child)
    assert (seen["id"], seen["parent"], seen["root"]) == (child, parent, parent)
    assert seen["library"] != way.worker


def test_a_countdown_is_kept(way: Way) -> None:
    early, ran = way(
        "(lambda due, sent: [due, get(sent)])(now(), now.apply_async(queue=queue, countdown=0.6))"
    )
    assert early + 0.6 <= ran <= early + 11.0


@pytest.mark.parametrize("zone", ["UTC", "timezone(timedelta(hours=-5))"])
def test_an_eta_is_kept_whatever_its_zone(way: Way, zone: str) -> None:
    eta = f"datetime.now({zone}) + timedelta(seconds=0.5)"
    due, ran = way(f"(lambda eta: [eta.timestamp(), get(now.apply_async(queue=queue, eta=eta))])({eta})")
    assert due <= ran <= due + 10.0


def test_states_on_the_way_are_seen(way: Way, gate: Path) -> None:
    task_id = way("reports_progress.apply_async((gate,), queue=queue).id", gate=str(gate))
    wait_until(
        lambda: way("app.AsyncResult(task_id).state", task_id=task_id) == "HALFWAY",
        what="the state of its own",
    )
    assert way("app.AsyncResult(task_id).result", task_id=task_id) == {"done": 50}
    gate.touch()
    assert way("get(app.AsyncResult(task_id))", task_id=task_id) == "done"


def test_a_started_task_says_so_where_it_is_tracked(way: Way, gate: Path) -> None:
    task_id = way("waits_for.apply_async((gate,), queue=queue).id", gate=str(gate))
    wait_until(
        lambda: way("app.AsyncResult(task_id).state", task_id=task_id) == "STARTED", what="the state STARTED"
    )
    assert way("sorted(app.AsyncResult(task_id).result)", task_id=task_id) == ["hostname", "pid"]
    gate.touch()
    assert way("get(app.AsyncResult(task_id))", task_id=task_id) == "done"


@pytest.mark.parametrize(
    "sent",
    [
        "add.apply_async((1, 1), queue=queue, ignore_result=True, task_id=task_id, link=follows)",
        "silent.apply_async(queue=queue, task_id=task_id, link=follows)",
        "app.send_task('shared_tasks.silent', queue=queue, task_id=task_id, link=follows)",
    ],
)
def test_an_ignored_result_is_not_stored(way: Way, sent: str) -> None:
    task_id, follow_id = str(uuid4()), str(uuid4())
    way(
        f"(lambda follows: {sent}.id)(where.si().set(queue=queue, task_id=follow_id))",
        task_id=task_id,
        follow_id=follow_id,
    )
    assert way("get(app.AsyncResult(follow_id))", follow_id=follow_id) == way.worker
    # The callback was sent before the result would have been stored, and one more task after both.
    way("get(where.apply_async(queue=queue))")
    assert way("app.AsyncResult(task_id).state", task_id=task_id) == "PENDING"


def test_maps_and_chunks_run_there(way: Way) -> None:
    assert way("get(echo.map([1, 'two', None]).set(queue=queue).apply_async())") == [1, "two", None]
    assert way("get(add.starmap([(1, 2), (3, 4)]).set(queue=queue).apply_async())") == [3, 7]
    chunked = "get(add.chunks([(n, n) for n in range(5)], 2).apply_async(queue=queue))"
    assert way(chunked) == [[0, 2], [4, 6], [8]]
