"""Chains and groups whose steps run on both kinds of worker, composed by either kind of client."""

from pathlib import Path
from uuid import uuid4

import pytest

from tests.interop.conftest import ON_REDIS, Crossing
from tests.interop.mixed_cluster import Client, MixedCluster, Raised

# ---- chains ----------------------------------------------------------------------------------------


def test_a_chain_goes_back_and_forth(crossing: Crossing) -> None:
    found = crossing(
        "get(chain(*[trail.s([]).set(queue=here), *[trail.s().set(queue=q) for q in (there, here, there)]])"
        ".apply_async())"
    )
    assert found == [crossing.first, crossing.second] * 2


def test_every_step_of_a_chain_can_be_asked(crossing: Crossing) -> None:
    found = crossing(
        "(lambda last: [get(last), get(last.parent), get(last.parent.parent)])"
        "((add.s(1, 1).set(queue=here) | add.s(10).set(queue=there) | add.s(100).set(queue=here))"
        ".apply_async())"
    )
    assert found == [112, 12, 2]


def test_a_chain_knows_its_root_and_each_step_its_parent(crossing: Crossing) -> None:
    first, second, last = crossing(
        "(lambda last: [last.parent.parent.id, last.parent.id, get(last)])"
        "((echo.s(0).set(queue=here) | about_itself.s().set(queue=there) | about_itself.s().set(queue=here))"
        ".apply_async())"
    )
    assert (last["root"], last["parent"]) == (first, second)


def test_an_immutable_step_takes_no_result(crossing: Crossing) -> None:
    assert crossing("get((add.s(1, 1).set(queue=here) | add.si(5, 5).set(queue=there)).apply_async())") == 10


def test_a_chain_that_breaks_fails_to_its_end(crossing: Crossing) -> None:
    with pytest.raises(Raised, match="boom") as caught:
        crossing(
            "get((echo.s('boom').set(queue=there) | fails.s().set(queue=here) | add.s(1).set(queue=there)"
            " | add.s(1).set(queue=here)).apply_async())"
        )
    assert caught.value.kind == "ValueError"


def test_the_errback_of_a_chain_hears_of_the_step_that_failed(crossing: Crossing) -> None:
    failing_id, errback_id = str(uuid4()), str(uuid4())
    crossing(
        "(echo.s('boom').set(queue=there) | fails.s().set(queue=here, task_id=failing_id)"
        " | echo.s().set(queue=here))"
        ".apply_async(link_error=sees_failure.s().set(queue=there, task_id=errback_id)).id",
        failing_id=failing_id,
        errback_id=errback_id,
    )
    found = crossing("get(app.AsyncResult(errback_id))", errback_id=errback_id)
    assert found == [crossing.second, failing_id]


def test_a_delayed_step_of_a_chain_waits(crossing: Crossing) -> None:
    sent, ran = crossing(
        "(lambda sent: [sent, get((echo.s(1).set(queue=here) | now.s().set(queue=there, countdown=0.5))"
        ".apply_async())])(now())"
    )
    assert sent + 0.5 <= ran <= sent + 11.0


def test_a_retried_step_goes_on_with_the_chain(crossing: Crossing) -> None:
    found = crossing(
        "get((echo.s(2).set(queue=there) | flaky.s().set(queue=here) | where_and.s().set(queue=there))"
        ".apply_async())"
    )
    assert found == [
        crossing.second,
        [crossing.first, 2, False],
    ]  # its parent is still the step before


# ---- groups ----------------------------------------------------------------------------------------


def test_a_group_has_members_on_both(client: Client) -> None:
    found = client(
        "get(group([where_and.s(n).set(queue=[on_umbel, on_celery][n % 2]) for n in range(10)])"
        ".apply_async())"
    )
    assert found == [["celery" if n % 2 else "umbel", n] for n in range(10)]


def test_members_know_their_group_and_place(client: Client) -> None:
    group_id, members = client(
        "(lambda result: [result.id, get(result)])"
        "(group([about_itself.s().set(queue=q) for q in (on_umbel, on_celery, on_umbel)]).apply_async())"
    )
    assert [(one["group"], one["index"]) for one in members] == [(group_id, place) for place in range(3)]


def test_the_error_of_a_member_is_raised_for_the_group(client: Client) -> None:
    for failing, working in (("on_umbel", "on_celery"), ("on_celery", "on_umbel")):
        with pytest.raises(Raised, match="boom"):
            client(
                "get(group([add.s(1, 1).set(queue=working), fails.s().set(queue=failing)]).apply_async())",
                failing=failing,
                working=working,
            )


def test_a_group_follows_a_step_of_a_chain(crossing: Crossing) -> None:
    found = crossing(
        "get((add.s(1, 1).set(queue=here)"
        " | group([add.s(10).set(queue=there), add.s(20).set(queue=here)])).apply_async())"
    )
    assert found == [12, 22]


def test_a_group_of_chains_runs_on_both(client: Client) -> None:
    found = client(
        "get(group([trail.s([]).set(queue=a) | trail.s().set(queue=b)"
        " for a, b in ((on_umbel, on_celery), (on_celery, on_umbel))]).apply_async())"
    )
    assert found == [["umbel", "celery"], ["celery", "umbel"]]


def test_a_queue_that_both_consume_loses_and_doubles_nothing(client: Client, tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    client(
        "get(group([notes.s(journal, n).set(queue=on_either) for n in range(200)]).apply_async())",
        journal=str(journal),
    )
    assert sorted(map(int, journal.read_text().split())) == list(range(200))


# ---- chords (all that can be mixed: test_chords.py) ------------------------------------------------


def test_a_chord_has_parts_on_both_and_its_body_on_either(crossing: Crossing) -> None:
    found = crossing(
        "get(chord([add.s(n, n).set(queue=[here, there][n % 2]) for n in range(6)],"
        " where_and.s().set(queue=there)).apply_async())"
    )
    assert found == [crossing.second, [0, 2, 4, 6, 8, 10]]


def test_parts_of_one_kind_have_a_body_of_the_other(crossing: Crossing) -> None:
    found = crossing(
        "get((group([add.s(n, n).set(queue=here) for n in range(3)]) | total.s().set(queue=there)"
        " | where_and.s().set(queue=here)).apply_async())"
    )
    assert found == [crossing.first, 6]


def test_a_part_that_fails_fails_the_body(crossing: Crossing) -> None:
    with pytest.raises(Raised) as caught:
        crossing(
            "get_own(chord([add.s(1, 1).set(queue=there), fails.s().set(queue=here)],"
            " total.s().set(queue=there)).apply_async())"
        )
    assert (caught.value.kind, caught.value.is_known) == ("ChordError", True)


# ---- replaced tasks --------------------------------------------------------------------------------


def test_a_task_that_one_kind_replaces_is_finished_by_the_other(crossing: Crossing) -> None:
    assert crossing("get(becomes.apply_async((there,), queue=here))") == 42


def test_a_replaced_step_goes_on_with_its_chain(crossing: Crossing) -> None:
    found = crossing(
        "get((becomes.si(there).set(queue=here) | where_and.s().set(queue=there)).apply_async())"
    )
    assert found == [crossing.second, 42]


def test_tasks_that_celery_sends_by_itself_are_known(client: Client) -> None:
    gathered = "app.signature('celery.accumulate', ([1, 2],), {'index': 0}).set(queue=on_umbel)"
    assert client(f"get({gathered}.apply_async())") == [1, 2]
    assert client("get(app.send_task('celery.backend_cleanup', queue=on_umbel))") is None


# ---- the cluster itself ----------------------------------------------------------------------------


def test_celerys_workers_live_with_our_events(cluster: MixedCluster) -> None:
    """Their gossip hears our heartbeats on celeryev, as their logs would say if it choked on them."""
    for worker in cluster.workers.values():
        worker.check()
        assert "CRITICAL" not in worker.log
        assert "Substantial drift" not in worker.log
        assert "Connection to broker lost" not in worker.log


# ---- groups without members ------------------------------------------------------------------------

SENT = """(lambda sent: [
    type(sent).__name__, get(sent), bool(sent), type(sent.parent).__name__,
    [sent.ready(), sent.successful(), sent.failed(), len(sent)] if hasattr(sent, "results") else None,
])"""


@ON_REDIS
@pytest.mark.parametrize("client", ["umbel"], indirect=True)
@pytest.mark.parametrize(
    "composed",
    [
        "group([])",
        "group()",
        "group(one for one in [])",
        "group([group([]), group()])",
        "group([group([]), HERE(echo.s(1))])",
        "group([chain(), HERE(echo.s(1))])",
        "group([chord([], HERE(echo.s()))])",
        "group([]) | group([])",
        "group([]) | HERE(echo.s())",
        "group([]) | group([]) | HERE(echo.s())",
        "HERE(echo.s(1)) | group([])",
        "HERE(echo.s(1)) | (group([]) | HERE(echo.s()))",
        "(HERE(echo.s(1)) | HERE(add.s(1))) | group([]) | HERE(add.s(1))",
        "group([HERE(echo.s(1)), HERE(echo.s(2))]) | group([])",
        "chain(group([]))",
        "chain(group([]), HERE(echo.s(5)))",
        "chain(chain(group([])), HERE(echo.s(5)))",
        "chain(group([])) | HERE(echo.s())",
        "chain(HERE(echo.s(1)), group([]))",
        "chain(HERE(echo.s(1)), group([]), HERE(add.s(1)))",
        "chain(group([HERE(echo.s(1)), HERE(echo.s(2))]), group([]))",
        "chord([], HERE(total.s()))",
        "chord(group([]), HERE(echo.s()))",
        "chord([group([])], HERE(echo.s()))",
        "chord([chain()], HERE(echo.s()))",
        "chord([HERE(echo.s(1)), group([])], HERE(echo.s()))",
        "chord([HERE(echo.s(1)), HERE(echo.s(2))], group([]))",
        "chord([HERE(echo.s(1))], group([]))",
        "chord(group([]), group([]))",
        "chord([HERE(echo.s(1)), HERE(echo.s(2))], HERE(echo.s())) | group([])",
    ],
)
def test_an_empty_group_means_what_it_means_to_celery(
    client: Client, cluster: MixedCluster, composed: str
) -> None:
    asked = f"(lambda HERE: {SENT}(({composed}).apply_async()))(lambda one: one.set(queue='on_umbel'))"
    assert client(asked) == cluster.client("celery")(asked)


@ON_REDIS
@pytest.mark.parametrize("client", ["umbel"], indirect=True)
@pytest.mark.parametrize("how", ["delay()", "apply_async()", "apply()", "apply_async((1,), countdown=5)"])
def test_a_group_without_members_has_its_result_however_it_is_sent(
    client: Client, cluster: MixedCluster, how: str
) -> None:
    asked = f"{SENT}(group([]).{how})"
    found = client(asked)
    assert found == cluster.client("celery")(asked)
    assert found == ["GroupResult", [], True, "NoneType", [True, True, False, 0]]
