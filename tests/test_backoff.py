"""Backoff: pauses that grow with the failures in a row."""

import asyncio

import pytest

from umbel import backoff
from umbel.backoff import Backoff


def test_each_failure_in_a_row_doubles_the_pause_up_to_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backoff, "random", lambda: 1.0)
    retries = Backoff(first_s=1.0, most_s=10.0)
    assert [retries.wait_s() for _ in range(5)] == [2.0, 4.0, 8.0, 10.0, 10.0]
    assert retries.failures == 5
    retries.reset()
    assert (retries.failures, retries.wait_s()) == (0, 2.0)


def test_a_pause_counts_as_a_failure() -> None:
    async def scenario() -> int:
        retries = Backoff(first_s=0.0, most_s=0.0)
        for _ in range(3):
            await retries.pause()
        return retries.failures

    assert asyncio.run(scenario()) == 3
