"""What an app can be elected to do, and how its client asks for it (E3, E4, R5)."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from umbel import App, chain
from umbel.app.cluster.topics import send_elected
from umbel.brokers.interface import Delivery
from umbel.brokers.registry import open_broker
from umbel.coordination.election_context import ElectionContext
from umbel.errors import ConfigurationError, ElectionError
from umbel.protocol.election.events import RunHandler
from umbel.protocol.leadership.coordination import (
    NAMESPACE,
    ElectionRecord,
    ElectionRequest,
    ElectionState,
    Policy,
    election_key,
)
from umbel.wire.call import decode_task


@pytest.fixture
def app(tmp_path: Path) -> Iterator[App]:
    app = App("shop", broker=f"sqlite:///{tmp_path / 'queue.db'}")

    @app.task(name="pack")
    def pack(box: int = 0) -> int:
        return box

    yield app
    app.close()


def elected(election_id: str = "e", *, term: int = 7, deadline_s: float = 1e12) -> ElectionContext:
    request = ElectionRequest(election_id, "task", b"{}", Policy.AT_MOST_ONCE, 0.0)
    return ElectionContext(RunHandler(request, "key", term, 1, deadline_s))


def sent(app: App) -> list[Delivery]:
    async def look() -> list[Delivery]:
        broker = open_broker(app.settings.for_broker())
        await broker.open()
        try:
            return list(await broker.peek("celery", 10))
        finally:
            await broker.close()

    return asyncio.run(look())


def record(app: App, election_id: str) -> ElectionRecord:
    async def look() -> ElectionRecord | None:
        broker = open_broker(app.settings.for_broker())
        await broker.open()
        try:
            return await broker.coordination.read_election(election_key(NAMESPACE, election_id))
        finally:
            await broker.close()

    found = asyncio.run(look())
    assert found is not None
    return found


def test_an_elected_worker_sends_the_task_with_a_fence_r5(app: App) -> None:
    send_elected(app, app.signature("pack", [1]).to_map(), elected())
    (delivery,) = sent(app)
    call = decode_task(delivery.message)
    assert (call.args, call.extra["fence"]) == ([1], {"key": "key", "term": 7})


def test_a_task_without_an_id_has_the_same_one_whoever_sends_it_r5(app: App) -> None:
    call = app.signature("pack").to_map()
    first, second = send_elected(app, call, elected()), send_elected(app, call, elected(term=8))
    assert first == second
    assert send_elected(app, call, elected("other")) != first


def test_a_task_keeps_the_id_and_headers_it_was_given(app: App) -> None:
    call = app.signature("pack", task_id="mine", headers={"colour": "red"}).to_map()
    assert send_elected(app, call, elected()) == "mine"
    (delivery,) = sent(app)
    assert decode_task(delivery.message).extra == {"colour": "red", "fence": {"key": "key", "term": 7}}


def test_by_the_classic_rules_there_is_no_term_to_fence_with(app: App) -> None:
    send_elected(app, app.signature("pack").to_map(), elected(deadline_s=float("inf")))
    (delivery,) = sent(app)
    assert "fence" not in decode_task(delivery.message).extra


def test_a_chain_is_sent_as_one(app: App) -> None:
    call = chain(app.signature("pack", [1]), app.signature("pack")).to_map()
    send_elected(app, call, elected())
    assert len(sent(app)) == 1


def test_an_action_that_is_no_signature_is_refused(app: App) -> None:
    with pytest.raises(ElectionError, match="must be a signature, not 'pack'"):
        send_elected(app, "pack", elected())


def test_an_election_is_opened_although_nobody_is_there(app: App) -> None:
    outcome = app.control.election("e", "task", app.signature("pack"), timeout=0)
    assert outcome.state == "open"
    assert record(app, "e").state is ElectionState.OPEN


def test_a_signature_is_elected_under_its_own_task_id_e4(app: App) -> None:
    result = app.signature("pack", [3]).election()
    assert record(app, result.id).request.topic == "task"


def test_a_handlers_policy_is_that_of_its_elections(app: App) -> None:
    @app.election_handler("again", policy="at_least_once")
    def again(action: object, context: ElectionContext) -> None: ...

    app.control.election("e", "again", timeout=0)
    app.control.election("f", "again", policy="at_most_once", timeout=0)
    assert record(app, "e").request.policy is Policy.AT_LEAST_ONCE
    assert record(app, "f").request.policy is Policy.AT_MOST_ONCE
    with pytest.raises(ConfigurationError, match="election policy 'twice' is unknown; it must be one of"):
        app.election_handler("more", policy="twice")(again)


def test_the_same_id_is_the_same_election_and_nothing_else(app: App) -> None:
    app.control.election("e", "task", app.signature("pack", [1]), timeout=0)
    assert app.control.election("e", "task", app.signature("pack", [1]), timeout=0).state == "open"
    with pytest.raises(ElectionError, match=r"'e' already exists, for topic 'task' with another action"):
        app.control.election("e", "task", app.signature("pack", [2]), timeout=0)


@pytest.mark.parametrize(
    ("election_id", "topic", "expires"),
    [("", "task", 5.0), ("x" * 129, "t", 5.0), ("e", "", 5.0), ("e", "t", 0.0)],
)
def test_what_no_worker_would_take_is_refused_here(
    app: App, election_id: str, topic: str, expires: float
) -> None:
    with pytest.raises(ElectionError, match="cannot open election"):
        app.control.election(election_id, topic, expires=expires, timeout=0)


def test_async_code_can_elect_too(app: App) -> None:
    outcome = asyncio.run(app.control.aio.election("e", "task", app.signature("pack"), timeout=0))
    assert outcome.state == "open"
