"""Leading something while a block runs (E6), on the embedded broker; the scenarios have the others."""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, cast

import pytest

from umbel import App
from umbel.brokers.interface import Broker
from umbel.errors import LeaseTimeout


def play(tmp_path: Path, scenario: Callable[[App], Coroutine[Any, Any, None]]) -> App:
    app = App("leases", broker=f"sqlite:///{tmp_path / 'queue.db'}")

    @app.task(name="tick")
    def tick() -> None: ...

    async def bounded() -> None:
        async with asyncio.timeout(60):
            await scenario(app)

    asyncio.run(bounded())
    app.close()
    return app


def test_one_leads_and_the_next_has_a_higher_term(tmp_path: Path) -> None:
    async def scenario(app: App) -> None:
        async with app.lease("beat") as first:
            assert first.still_mine()
            assert await first.update(b"state")
            with pytest.raises(LeaseTimeout, match=r"'beat' was not free within 0\.2 s; its holder is gen"):
                async with app.lease("beat", timeout=0.2):
                    pass
        assert not first.still_mine()
        async with app.lease("beat") as second:
            assert (second.term > first.term, second.data) == (True, b"state")

    play(tmp_path, scenario)


def test_only_the_leader_sends(tmp_path: Path) -> None:
    async def scenario(app: App) -> None:
        tick = app.signature("tick")
        async with app.lease("beat") as first:
            assert await first.send([tick, tick])
            stolen = await first._broker.coordination.release_lease("beat", first._keeper.holder, first.term)
            assert stolen
            async with app.lease("beat") as second:
                assert not await first.send([tick])
                assert not await first.update(b"late")
                assert await second.send([tick])
            depths = await cast("Broker", first._broker).queues()
            assert depths["celery"].ready == 3

    play(tmp_path, scenario)


def test_a_lost_lease_is_noticed_and_not_taken_again_behind_the_blocks_back(tmp_path: Path) -> None:
    async def scenario(app: App) -> None:
        async with app.lease("beat", ttl=0.6) as first:
            assert await first._broker.coordination.release_lease("beat", first._keeper.holder, first.term)
            await first.lost.wait()
            assert not first.still_mine() and first._task is not None
            await asyncio.wait([first._task])  # it campaigns no more
            assert (await first._broker.coordination.read_lease("beat")).holder == ""

    play(tmp_path, scenario)


def test_a_lease_is_kept_for_longer_than_its_ttl(tmp_path: Path) -> None:
    async def scenario(app: App) -> None:
        async with app.lease("beat", ttl=2.0) as lease:
            with pytest.raises(LeaseTimeout):
                async with app.lease("beat", ttl=2.0, timeout=2.6):
                    pass
            assert lease.still_mine()

    play(tmp_path, scenario)
