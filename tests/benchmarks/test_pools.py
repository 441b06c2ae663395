"""The benchmark runs from end to end; how quick it is, is for `make bench` to say."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks._throughput.servers import stop_servers
from benchmarks.pools import BENCHMARK, MEASURES


@pytest.fixture
def servers() -> Iterator[None]:
    yield
    stop_servers()


def test_it_measures_every_pool_of_umbel(
    servers: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    found = BENCHMARK.run(rounds=1, tasks=20, only=["umbel"])
    assert set(found.samples["umbel"]) == {measure.name for measure in MEASURES}
    assert found.ratios() == []
