"""`umbel members --watch` beside a broker that is slow to answer."""

import asyncio
from typing import Any, cast

import pytest

from umbel.brokers.interface import Broker
from umbel.cli import coordination
from umbel.errors import BrokerUnavailable


def test_a_watch_goes_on_where_its_first_question_could_not_be_sent(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers: list[Any] = [BrokerUnavailable("could not be sent within 1 s"), [{"node": "w1@h"}]]
    introduced: list[Any] = []

    async def known(*_: object) -> Any:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def introduce(rows: Any) -> None:
        introduced.append(rows)

    async def watch() -> None:
        watched = coordination.Watch(cast(Broker, None), as_json=True)
        monkeypatch.setattr(watched._members, "introduce", introduce)
        await watched._begin(1.0)

    monkeypatch.setattr(coordination, "known_members", known)
    monkeypatch.setattr(coordination, "ASK_AGAIN_S", 0.0)
    asyncio.run(watch())
    assert introduced == [[{"node": "w1@h"}]]
    assert "cannot ask which nodes are there; retrying: could not be sent" in capsys.readouterr().err
