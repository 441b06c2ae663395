"""What the lake's tables tell the time slider: real Parquet, read by DuckDB."""

import asyncio
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.history.published import BEGAN, Story, publish
from umbel.events.tables import row
from umbel.events.view import EventReader
from umbel.history.query import read
from umbel.web import lake as module
from umbel.web.history import CACHED_MAX, RecordedCache
from umbel.web.lake import Recorded, recorded

T0 = BEGAN.timestamp()
READER = EventReader()
Told = tuple[float, str, str]


def said(kind: str, at_s: float, host: str, **extra: Any) -> dict[str, Any]:
    """A row of the timeline, with what the recorder writes of an event that says this on the wire."""
    event = READER.read({"type": kind, "hostname": host, "timestamp": T0 + at_s, "clock": 1, **extra})
    assert event is not None
    written = row(event, recorded_us=0, source="")
    kept = {"type": written["type"], "hostname": written["hostname"], "extra": written.get("extra")}
    moment = BEGAN + timedelta(seconds=at_s)
    return kept | {"subject": host, "rank": 1, "timestamp": moment, "clock": 1, "digest": 1}


def lake_in(home: Path, *timeline: dict[str, Any]) -> Path:
    """An hour of the shop, in which w2 is lost and comes back and w3 comes later and leaves."""
    rows = Story(tasks=3).rows
    rows["timeline"] += timeline
    return publish(home / "lake", rows)


def asked(lake: Path, since_s: float, until_s: float) -> Recorded:
    return read(lake, lambda tables: recorded(tables, T0 + since_s, T0 + until_s))


def told(found: Recorded) -> list[Told]:
    return [(round(one.at - T0, 2), one.kind, one.subject) for one in found.happenings]


GOSSIP = (
    said("worker-leader", 5, "w2@shop", lease="scheduler", leader="w2@shop.11.7", term=1, phase="acquired"),
    said("worker-suspect", 1490, "w1@shop", subject="w2@shop"),
    said("worker-suspect", 1491, "w3@shop", subject="w2@shop"),
    said("worker-lost", 1498, "w1@shop", subject="w2@shop", reason="its process died"),
    said("worker-lost", 1499, "w3@shop", subject="w2@shop"),
    said(
        "worker-leader", 1502, "w1@shop", lease="scheduler", leader="w1@shop.10.9", term=2, phase="acquired"
    ),
    said("worker-suspect", 2000, "w1@shop", subject="w3@shop"),
    *(said("worker-heartbeat", at, "w3@shop") for at in (1999, 2003, 2005)),
)


def test_sessions_gossip_leases_and_elections_become_what_happened(tmp_path: Path) -> None:
    found = asked(lake_in(tmp_path, *GOSSIP), 0, 3600)
    assert told(found) == [
        (0.0, "joined", "w1@shop"),
        (0.0, "joined", "w2@shop"),
        (5.0, "lease", "scheduler"),
        (300.0, "joined", "w3@shop"),
        (600.04, "elected", "e0"),
        (1200.04, "elected", "e1"),
        (1490.0, "suspect", "w2@shop"),
        (1498.0, "lost", "w2@shop"),
        (1502.0, "lease", "scheduler"),
        (1560.0, "returned", "w2@shop"),
        (2000.0, "suspect", "w3@shop"),
        (2003.0, "alive", "w3@shop"),
        (3300.0, "left", "w3@shop"),
    ], "each change once, though two nodes told of the loss and the session ended too"
    texts = {one.text for one in found.happenings}
    assert {"its process died", "scheduler is held by w1@shop", "w1@shop was elected for task"} <= texts
    assert (found.known_from, found.known_until, found.build, found.more) == (T0, T0 + 3600, 1, False)


def test_a_later_time_begins_with_who_was_there_and_who_led(tmp_path: Path) -> None:
    lake = lake_in(tmp_path, *GOSSIP)
    assert told(asked(lake, 1600, 1900)) == [
        (0.0, "joined", "w1@shop"),
        (300.0, "joined", "w3@shop"),
        (1502.0, "lease", "scheduler"),
        (1560.0, "returned", "w2@shop"),
    ]
    assert {one for _, _, one in told(asked(lake, 3400, 3500))} == {"w1@shop", "w2@shop", "scheduler"}
    assert asked(lake, -900, -600).happenings == []


def test_a_process_that_is_replaced_before_it_is_missed_is_not_lost(tmp_path: Path) -> None:
    rows = Story(tasks=1).rows
    rows["workers"][1]["ended_at"] = BEGAN + timedelta(seconds=1570)  # w2 is back since 1560
    rows["workers"][2]["sw_ver"] = "0.2"
    lake = publish(tmp_path / "lake", rows)
    of_w2 = [one for one in asked(lake, 0, 3600).happenings if one.subject == "w2@shop"]
    assert [one.kind for one in of_w2] == ["joined", "returned", "version"]
    assert of_w2[-1].text == "w2@shop: 0.1 → 0.2"


def test_why_a_node_was_lost_is_known_though_its_silence_ended_its_session_before(tmp_path: Path) -> None:
    late = said("worker-lost", 1503, "w1@shop", subject="w2@shop", reason="its process died")
    found = asked(lake_in(tmp_path, late), 1000, 1520)
    [lost] = [one for one in found.happenings if one.kind == "lost"]
    assert (lost.at - T0, lost.text) == (1500.0, "its process died")


def test_a_node_that_was_wrongly_held_for_lost_is_alive_again_with_its_next_heartbeat(tmp_path: Path) -> None:
    wrong = said("worker-lost", 2000, "w1@shop", subject="w3@shop")
    lake = lake_in(tmp_path, wrong, said("worker-heartbeat", 2003, "w3@shop"))
    of_w3 = [(at, kind) for at, kind, subject in told(asked(lake, 1900, 3600)) if subject == "w3@shop"]
    assert of_w3 == [(300.0, "joined"), (2000.0, "suspect"), (2003.0, "alive"), (3300.0, "left")]
    assert (2003.0, "alive", "w3@shop") in told(asked(lake, 2500, 2600)), "and is there later on"


def test_who_asks_while_the_tables_are_read_gets_the_same_answer() -> None:
    answer = Recorded(happenings=[], since=0.0, known_from=None, known_until=None, build=1, built_at="")
    reads: list[int] = []

    async def slowly() -> Recorded:
        reads.append(1)
        await asyncio.to_thread(int)
        return answer

    async def scenario() -> None:
        kept = RecordedCache()
        assert set(map(id, await asyncio.gather(*(kept.get(0, 1, slowly) for _ in range(5))))) == {id(answer)}

    asyncio.run(scenario())
    assert len(reads) == 1


def test_too_many_changes_are_cut_to_the_newest_and_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CHANGES_MAX", 3)
    found = asked(lake_in(tmp_path, *GOSSIP[:1]), 0, 3600)
    assert found.more and found.since == T0 + 1500
    assert told(found) == [
        (0.0, "joined", "w1@shop"),
        (0.0, "joined", "w2@shop"),
        (5.0, "lease", "scheduler"),
        (300.0, "joined", "w3@shop"),
        (1500.0, "lost", "w2@shop"),
        (1560.0, "returned", "w2@shop"),
        (3300.0, "left", "w3@shop"),
    ], "and what stood before them"


@pytest.mark.parametrize(
    "extra", [None, "", "{nonsense", "[1]", '{"subject": {"a": 1}}', '{"lease": 7, "term": "x", "phase": 1}']
)
def test_what_a_node_said_wrongly_is_passed_over(tmp_path: Path, extra: str | None) -> None:
    lake = lake_in(
        tmp_path,
        *(said(kind, 100, "w1@shop") | {"extra": extra} for kind in ("worker-lost", "worker-leader")),
    )
    strange = {one for at, _, one in told(asked(lake, 90, 110)) if at == 100.0}
    assert strange <= {'{"a":1}', "7"}


def test_what_was_read_is_kept_for_a_while_and_not_all_of_it() -> None:
    reads: list[float] = []

    async def recall(kept: RecordedCache, since: float) -> None:
        async def look() -> Recorded:
            reads.append(since)
            return Recorded(happenings=[], since=0, known_from=None, known_until=None, build=1, built_at="")

        await kept.get(since, 100.0, look)

    async def scenario(times: Sequence[float]) -> None:
        kept = RecordedCache()
        for one in times:
            await recall(kept, one)

    asyncio.run(scenario([0.0, 0.0, *map(float, range(1, CACHED_MAX + 1)), 0.0]))
    assert reads == [0.0, *map(float, range(1, CACHED_MAX + 1)), 0.0]
