"""D1: who records also keeps the lake in order, and nobody has to ask for it."""

import asyncio
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests.history.recording import paths_of
from tests.history.test_housekeeping import add_file
from umbel.brokers.interface import BrokerSettings
from umbel.brokers.registry import open_broker
from umbel.history.lake import Lake
from umbel.worker import recording
from umbel.worker.recording import RecorderCandidate, RecordingSettings

LONG_AGO = datetime(2026, 1, 2, 3, tzinfo=UTC).timestamp()
DAY_S = 86_400.0


def test_past_hours_are_written_by_bucket_and_old_days_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "HOUSEKEEPING_AFTER_S", 0.0)
    lake = Lake(tmp_path / "lake")
    add_file(lake, LONG_AGO, 1)
    recent = datetime.now(UTC).timestamp() - DAY_S
    add_file(lake, recent, 2)
    broker = open_broker(BrokerSettings(url=f"sqlite:///{tmp_path / 'queue.db'}"))
    settings = RecordingSettings(lake.store.where, keep_days=3)
    candidate = RecorderCandidate(broker, settings, "me")

    async def keep_house() -> None:
        keeping = asyncio.create_task(candidate._keep_house(lake))
        async with asyncio.timeout(60):
            while "dt=2026-01-02" in lake.store.folders("events"):
                await asyncio.wait({keeping}, timeout=0.02)
        keeping.cancel()
        await asyncio.wait({keeping})

    asyncio.run(keep_house())
    assert {path.parents[0].name for path in paths_of(lake)} == {f"dt={day_of(recent)}"}
    assert all("-b000of001" in path.name or "-others" in path.name for path in paths_of(lake))


def day_of(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).date().isoformat()
