"""Results sent to who asked (rpc://), between both kinds of client and worker.

A client has a queue of its own, and the worker publishes the result there: nothing is stored. So a
result can be asked for in the client that sent the task and nowhere else, and there are no chords.
"""

from collections.abc import Iterator

import pytest

from tests.interop.conftest import BROKERS, WAYS, Way, shown_when_it_fails
from tests.interop.mixed_cluster import Client, MixedCluster, Raised
from tests.servers.rabbitmq import shared_server
from tests.servers.redis import RedisServer


@pytest.fixture(scope="module", params=BROKERS)
def cluster(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, results_server: RedisServer
) -> Iterator[MixedCluster]:
    """It takes the place of the one that stores results, for the tests of this file."""
    broker = f"{results_server.url.removesuffix('0')}{len(BROKERS)}"
    if request.param == "rabbitmq":
        server = shared_server()
        broker = server.url(server.new_vhost())
    home, versions = tmp_path_factory.mktemp(f"interop-rpc-{request.param}"), ["celery", "celery55"]
    made = MixedCluster(home, "rpc", broker=broker, backend="rpc://", versions=versions)
    with shown_when_it_fails(request, made) as cluster:
        yield cluster


@pytest.fixture(params=[*WAYS, "umbel to celery 5.5"])
def way(request: pytest.FixtureRequest, cluster: MixedCluster) -> Way:
    library, queue = WAYS.get(request.param, ("umbel", "on_celery55"))
    return Way(cluster.client(library), queue)


def test_a_result_is_sent_to_who_asked(way: Way) -> None:
    assert way("get(add.apply_async((2, 3), queue=queue))") == 5


def test_many_results_find_their_askers(way: Way) -> None:
    found = way("[get(one) for one in [add.apply_async((n, n), queue=queue) for n in range(50)]]")
    assert found == [2 * n for n in range(50)]


def test_a_value_arrives_as_what_it_was(way: Way) -> None:
    assert way("get(echo.apply_async((Decimal('1.50'),), queue=queue)) == Decimal('1.50')")


def test_a_task_that_was_acknowledged_before_it_ran_answers(way: Way) -> None:
    assert way("get(hasty.apply_async((7,), queue=queue))") == 7


def test_an_error_is_sent_with_its_class_and_traceback(way: Way) -> None:
    with pytest.raises(Raised) as caught:
        way("get(breaks.apply_async(queue=queue))")
    assert (caught.value.kind, caught.value.module, caught.value.is_known) == ("Broken", "shared_tasks", True)
    traceback = way(
        "(lambda one: [get(one, propagate=False), one.traceback][1])(fails.apply_async(queue=queue))"
    )
    assert "in fails" in traceback


def test_an_unknown_task_is_told(way: Way) -> None:
    with pytest.raises(Raised, match=r"nobody\.knows") as caught:
        way("get(app.send_task('nobody.knows', queue=queue))")
    assert (caught.value.kind, caught.value.is_known) == ("NotRegistered", True)


def test_a_retried_task_answers_in_the_end(way: Way) -> None:
    assert way("get(flaky.apply_async((2,), queue=queue))") == [way.worker.removesuffix("55"), 2, True]


def test_a_delayed_task_answers(way: Way) -> None:
    assert way("get(add.apply_async((1, 1), queue=queue, countdown=0.5))") == 2


def test_an_expired_task_answers(way: Way) -> None:
    with pytest.raises(Raised, match="expired"):
        way("get(add.apply_async((1, 1), queue=queue, countdown=0.6, expires=0.3))")


def test_the_end_of_a_chain_over_all_workers_answers(client: Client) -> None:
    found = client(
        "get(chain(trail.s([]).set(queue=on_umbel), *[trail.s().set(queue=q)"
        " for q in (on_celery, on_celery55, on_umbel, on_celery)]).apply_async())"
    )
    assert found == ["umbel", "celery", "celery", "umbel", "celery"]


def test_a_chain_that_breaks_answers(client: Client) -> None:
    for failing in ("on_umbel", "on_celery", "on_celery55"):
        with pytest.raises(Raised, match="boom"):
            client(
                "get((echo.s('boom').set(queue=on_umbel) | fails.s().set(queue=failing)"
                " | add.s(1).set(queue=on_umbel)).apply_async())",
                failing=failing,
            )


def test_a_group_over_all_workers_answers(client: Client) -> None:
    found = client(
        "get(group([where_and.s(n).set(queue=[on_umbel, on_celery, on_celery55][n % 3]) for n in range(9)])"
        ".apply_async())"
    )
    assert found == [["umbel" if n % 3 == 0 else "celery", n] for n in range(9)]


def test_members_of_a_group_answer_from_chains(client: Client) -> None:
    found = client(
        "get(group([trail.s([]).set(queue=a) | trail.s().set(queue=b)"
        " for a, b in ((on_umbel, on_celery), (on_celery, on_umbel))]).apply_async())"
    )
    assert found == [["umbel", "celery"], ["celery", "umbel"]]
