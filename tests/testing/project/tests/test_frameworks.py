"""The fixtures in async tests of both plugins, and behind FastAPI's test client."""

import pytest
from fastapi.testclient import TestClient
from shop.api import api
from shop.tasks import add, greet, pack

from umbel import App
from umbel.testing import Clock, EmbeddedWorker, Inbox


@pytest.mark.asyncio
async def test_inbox_with_pytest_asyncio(umbel_inbox: Inbox) -> None:
    result = await greet.adelay("you")
    umbel_inbox.assert_sent_once(greet, "you")
    await umbel_inbox.arun()
    assert await result == "hello you"


@pytest.mark.asyncio
async def test_eager_and_clock_with_pytest_asyncio(umbel_eager: App, umbel_clock: Clock) -> None:
    result = await greet.aapply_async(["you"], countdown=60)
    assert result.state == "PENDING"
    umbel_clock.advance(60)
    assert await result == "hello you"


@pytest.mark.asyncio
async def test_worker_with_pytest_asyncio(umbel_worker: EmbeddedWorker) -> None:
    assert await (await greet.adelay("you")) == "hello you"


@pytest.mark.anyio
async def test_inbox_with_anyio(umbel_inbox: Inbox) -> None:
    result = add.delay(1, 2)
    umbel_inbox.run()
    assert result.get() == 3


@pytest.mark.anyio
async def test_worker_and_clock_with_anyio(umbel_worker: EmbeddedWorker, umbel_clock: Clock) -> None:
    result = await add.aapply_async([1, 2], countdown=60)
    umbel_clock.advance(60)
    assert await result == 3


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def test_what_a_request_sends_is_in_the_inbox(umbel_inbox: Inbox) -> None:
    with TestClient(api) as client:
        task_id = client.post("/orders/7").json()["task_id"]
    call = umbel_inbox.assert_sent_once(pack, 7)
    assert call.id == task_id
    umbel_inbox.run()
    assert call.result.get() == "packed 7"


def test_a_request_gets_its_result_in_eager_mode(umbel_eager: App) -> None:
    with TestClient(api) as client:
        assert client.get("/greeting/you").json() == {"greeting": "hello you"}


def test_a_request_gets_its_result_from_a_worker(umbel_worker: EmbeddedWorker) -> None:
    with TestClient(api) as client:
        assert client.get("/greeting/you").json() == {"greeting": "hello you"}
