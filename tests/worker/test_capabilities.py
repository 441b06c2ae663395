"""What a transport lacks is said in its own words (S7)."""

import asyncio
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.worker.light_node import LightNode
from umbel.brokers.sqlite.broker import SqliteBroker


@pytest.mark.parametrize(
    ("reasons", "said"),
    [
        ({"fanout": "a pigeon carries one letter at a time"}, "a pigeon carries one letter at a time"),
        ({}, "transport sqlite has no fan-out"),
    ],
)
def test_steps_that_are_off_say_why_in_the_words_of_the_transport(
    reasons: dict[str, str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    whole = SqliteBroker.capabilities.fget  # type: ignore[attr-defined]
    lacking = property(lambda broker: replace(whole(broker), fanout=False, reasons=reasons))
    monkeypatch.setattr(SqliteBroker, "capabilities", lacking)

    async def start() -> None:
        node = LightNode("w", tmp_path)
        await asyncio.gather(node.control.start(), node.mingle.start(), node.gossip.start())

    asyncio.run(start())
    for step in ("remote control", "mingle", "gossip"):
        assert f"{step} disabled: {said}" in caplog.text
