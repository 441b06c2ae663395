"""What the benchmark of the dashboard calls met."""

from typing import Any

import pytest

from benchmarks._web.stream import events
from benchmarks.web import judged


def found(*, page_s: float = 0.1, broken: int = 0, ratio: float = 0.95) -> dict[str, Any]:
    umbel = {"pages": {"/": {"median_s": 0.01}, "/tasks": {"median_s": page_s}}, "broken_streams": broken}
    return {"umbel": umbel, "drain": {"ratio": ratio}}


def test_all_is_met() -> None:
    assert all(judged(found()).values())


@pytest.mark.parametrize("worse", [{"page_s": 0.31}, {"broken": 1}, {"ratio": 0.89}], ids=str)
def test_what_is_not_met_is_said(worse: dict[str, Any]) -> None:
    assert list(judged(found(**worse)).values()).count(False) == 1


def test_every_node_tells_its_heartbeat_every_two_seconds() -> None:
    rate, nodes = 100, 10
    told = list(events(nodes, 500, rate))
    seconds = len(told) / rate
    beats = [one["hostname"] for one in told if one["type"] == "worker-heartbeat"]
    assert len(set(beats)) == nodes
    assert len(beats) == pytest.approx(nodes * seconds / 2, rel=0.1)
