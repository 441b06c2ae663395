"""Sidecar: when the process next to a worker is started again."""

import asyncio

import pytest

from umbel.worker import sidecar
from umbel.worker.sidecar import NOTHING_TO_DO_S, Sidecar, run_sidecar


def test_a_process_with_nothing_to_do_has_not_failed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    codes: list[int | str] = [1, "no such file", 0, 0, 1]
    pauses: list[float] = []

    async def run(process: Sidecar, stop_s: float) -> int | str:
        if not codes:
            raise asyncio.CancelledError
        return codes.pop(0)

    async def pause(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr(sidecar, "_run", run)
    monkeypatch.setattr(asyncio, "sleep", pause)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(run_sidecar(Sidecar("recorder", ["umbel"])))
    assert 0.1 <= pauses[0] <= 0.2 <= pauses[1] <= 0.4
    assert pauses[2:4] == [NOTHING_TO_DO_S] * 2
    assert 0.1 <= pauses[4] <= 0.2
    assert [record.__dict__["failures"] for record in caplog.records] == [1, 2, 1]
