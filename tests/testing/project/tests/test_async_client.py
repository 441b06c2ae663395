"""What the async client sends ends in the same places."""

import pytest
from shop.tasks import add, app, greet, pack, rebuild, ship

from umbel import App, chain, group
from umbel.testing import Clock, EmbeddedWorker, Inbox

pytestmark = pytest.mark.asyncio


async def test_every_async_way_of_sending_ends_in_the_inbox(umbel_inbox: Inbox) -> None:
    await add.adelay(1)
    await add.aapply_async((2,), queue="fast")
    await app.asend_task("shop.tasks.add", [3])
    await app.asend_many([add.s(4), add.s(5)])
    await group(add.s(6), add.s(7)).adelay()
    result = await chain(pack.s(7), ship.s()).adelay()
    assert [call.args for call in umbel_inbox.of(add)] == [(n,) for n in range(1, 8)]
    first, second = await rebuild.adelay("books"), await rebuild.adelay("books")
    assert first.id == second.id
    await umbel_inbox.arun()
    assert await result == "shipped: packed 7"


async def test_eager_and_clock(umbel_eager: App, umbel_clock: Clock) -> None:
    assert await (await greet.adelay("you")) == "hello you"
    later = await greet.aapply_async(["later"], countdown=60)
    assert await later.astate() == "PENDING"
    umbel_clock.advance(60)
    assert await later.aget(timeout=30) == "hello later"


async def test_worker_and_clock(umbel_worker: EmbeddedWorker, umbel_clock: Clock) -> None:
    assert await (await greet.adelay("you")) == "hello you"
    later = await greet.aapply_async(["later"], countdown=60)
    umbel_clock.advance(60)
    assert await later.aget(timeout=30) == "hello later"
