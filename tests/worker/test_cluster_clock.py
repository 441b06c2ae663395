"""The step that keeps the cluster's time: what it says, and what this process then takes for the time."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from umbel.clock import offset_s
from umbel.coordination.driver import instant
from umbel.protocol.leadership.coordination import Instant
from umbel.protocol.membership.members import MemberState
from umbel.worker.steps import cluster_clock
from umbel.worker.steps.cluster_clock import TOO_FEW, ClusterClock

HOUR_S = 3600.0


class Nobody:
    """A broker without a clock, a gossip and the tasks, as far as the step knows them."""

    def __init__(self) -> None:
        self.read_again = 0
        self.identity = SimpleNamespace(node="a@x")
        self.broker, self.revokes = self, SimpleNamespace(read_again=self._count)

    async def store_time(self) -> None:
        return None

    def listen(self, event_type: str, callback: object) -> None:
        pass

    def members(self) -> list[Any]:
        return [SimpleNamespace(node=node, state=MemberState.ALIVE) for node in ("a@x", "b@x", "c@x")]

    def log_fields(self, **fields: Any) -> dict[str, Any]:
        return fields

    def _count(self) -> None:
        self.read_again += 1


def test_a_lone_worker_says_that_it_trusts_its_clock_and_one_whose_clock_is_set_is_outvoted(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(cluster_clock, "JUDGE_EVERY_S", 0.001)
    monkeypatch.setattr(cluster_clock, "SETTLED_S", 0.0)
    nobody = cast("Any", Nobody())
    step = ClusterClock(nobody, nobody, nobody)

    async def said(text: str) -> None:
        while text not in caplog.text:
            await asyncio.to_thread(lambda: None)

    async def scenario() -> float:
        async with asyncio.timeout(20), asyncio.TaskGroup() as group:
            step.adopt(group)
            await step.start()
            await said(TOO_FEW)
            for node in ("b@x", "c@x"):
                step.answered(node, instant().wall_s)
            assert offset_s() == 0.0
            monkeypatch.setattr(cluster_clock, "instant", an_hour_ahead)
            await said("wall clock of this machine was changed")
            await said("using the cluster's time")
            corrected = offset_s()
            await step.stop()
        return corrected

    assert asyncio.run(scenario()) == pytest.approx(-HOUR_S, abs=1.0)
    assert offset_s() == 0.0
    assert nobody.read_again == 1
    assert caplog.text.count(TOO_FEW) == 1


def an_hour_ahead() -> Instant:
    now = instant()
    return Instant(now.boot_s, now.wall_s + HOUR_S)
