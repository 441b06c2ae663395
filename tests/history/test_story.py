"""D4, L5: the story of one task is every event of it once, in causal order, wherever it is kept."""

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.events.histories import TASKS, Wire, attempt, event, histories
from tests.history.published import Story as Shop
from tests.history.published import publish
from umbel import App
from umbel.brokers.interface import BrokerSettings
from umbel.brokers.registry import open_broker
from umbel.cli import exits
from umbel.cli.main import main
from umbel.cli.task import LINE_MAX
from umbel.events.merge import eid, registers_of, timeline
from umbel.events.tables import row
from umbel.events.types import TaskEvent
from umbel.events.view import EventReader, view
from umbel.history.lake import arrow, event_schema
from umbel.history.story import events_in_files, links_in_tables, rows_in_tables, story_of
from umbel.stores.local import store_at
from umbel.wire.event import encode_events
from umbel.wire.result import encode_success

RETRIED = [
    *attempt(0, "received", "started", "retried"),
    *attempt(1, "received", "started", "succeeded", clock=3),
]


def settled(wire: Sequence[Wire]) -> list[TaskEvent]:
    reader = EventReader()
    return [one for told in wire if isinstance(one := reader.read(told), TaskEvent)]


def write_file(path: Path, wire: Sequence[Wire]) -> Path:
    """As the recorder writes it."""
    reader = EventReader()
    rows = [row(one, recorded_us=5, source="test") for told in wire if (one := reader.read(told)) is not None]
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(arrow().Table.from_pylist(rows, schema=event_schema()), path)
    return path


@settings(max_examples=15)
@given(wire=histories(), seed=st.randoms(use_true_random=False))
def test_a_story_from_files_is_that_of_the_events(
    tmp_path_factory: pytest.TempPathFactory, wire: list[Wire], seed: object
) -> None:
    folder = tmp_path_factory.mktemp("files")
    half = len(wire) // 2
    files = [
        write_file(folder / "dt=2026-11-15/hour=10/a.parquet", wire[: half + 1]),
        write_file(folder / "dt=2026-11-15/hour=11/b.parquet", wire[half:]),  # one event is in both
    ]
    names = [path.relative_to(folder).as_posix() for path in files]
    for uuid in TASKS:
        events = [one for one in settled(wire) if one.uuid == uuid]
        story = story_of(uuid, events_in_files(store_at(folder), names, uuid))
        if not events:
            assert story is None
            continue
        assert story is not None
        assert [one.digest for one in story.events] == [eid(one) for one in timeline(events)]
        assert story.record == view(registers_of(uuid, events))


def test_what_only_the_tables_know_is_shown_from_them(tmp_path: Path) -> None:
    shop = Shop(tasks=30)
    lake = publish(tmp_path, shop.rows)
    uuid = next(one["task_id"] for one in shop.rows["tasks"] if one["retries"])
    story = story_of(uuid, [], rows_in_tables(lake, uuid))
    assert story is not None
    told = [one for one in shop.rows["timeline"] if one["task_id"] == uuid]
    assert [one.type for one in story.events] == [one["type"] for one in told]
    assert rows_in_tables(tmp_path / "nowhere", uuid) == []


def test_what_files_and_tables_both_know_is_there_once(tmp_path: Path) -> None:
    events = settled(RETRIED)
    kept = ("clock", "hostname", "pid")
    rows = [
        {"digest": eid(one), "type": one.type_name, "attempt": one.retries, "timestamp": None, "detail": None}
        | {name: getattr(one, name) for name in kept}
        for one in events[:4]
    ]
    story = story_of("t1", events[2:], rows)
    assert story is not None
    assert [one.type for one in story.events] == [one.type_name for one in timeline(events)]


def test_a_requeued_letter_tells_its_earlier_starts_from_events_and_from_tables() -> None:
    (received,) = settled([attempt(0, "received")[0] | {"earlier_starts": 3}])
    row = {"digest": 1, "type": "task-received", "attempt": 0, "timestamp": None, "detail": "pay"}
    row |= {"clock": 9, "hostname": "h", "pid": 1, "extra": '{"earlier_starts":6}'}
    story = story_of("t1", [received], [row])
    assert story is not None
    first, second = (str(one.detail) for one in story.events)
    assert first.endswith(", requeued after 3 starts") and second == "pay, requeued after 6 starts"


def test_a_file_is_read_by_its_name_and_not_as_a_pattern(tmp_path: Path) -> None:
    for folder in ("lake[1]*", "lake1x"):
        (tmp_path / folder).mkdir()
    written = write_file(tmp_path / "lake[1]*/one.parquet", RETRIED)
    write_file(tmp_path / "lake1x/one.parquet", RETRIED[:1])
    assert len(events_in_files(store_at(written.parent), [written.name], "t1")) == len(RETRIED)


def test_a_torn_file_hides_nothing_else_and_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    good = write_file(tmp_path / "good.parquet", RETRIED)
    torn = tmp_path / "torn.parquet"
    torn.write_bytes(good.read_bytes()[:100])
    names = [torn.name, good.name, "gone.parquet"]
    assert len(events_in_files(store_at(tmp_path), names, "t1")) == len(RETRIED)
    assert [name in caplog.text for name in ("torn.parquet", "gone.parquet", str(good))] == [
        True,
        True,
        False,
    ]


# -- the command -------------------------------------------------------------------------------------


def show(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["umbel", "task", "show", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    out, err = capsys.readouterr()
    assert isinstance(ended.value.code, int)
    return ended.value.code, out, err


def log(url: str, wire: Sequence[Wire]) -> None:
    """Into the broker's event log, as workers do while somebody records."""

    async def append() -> None:
        broker = open_broker(BrokerSettings(url=url))
        await broker.open()
        try:
            await broker.register_recorder("recorder")
            assert await broker.log_events([("task.multi", encode_events(wire))]) == 1
        finally:
            await broker.close()

    asyncio.run(append())


def test_files_log_and_result_are_put_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Half of the story is recorded, half is in the log still, and the backend knows the end."""
    monkeypatch.chdir(tmp_path)
    url = f"sqlite:///{tmp_path / 'shop.db'}"
    (tmp_path / "tasks.py").write_text(f"from umbel import App\napp = App('shop', broker={url!r})\n")
    write_file(tmp_path / "umbel-lake/events/dt=2026-11-15/hour=10/ev-a-0-0.parquet", RETRIED[:4])
    log(url, [*RETRIED[3:5], event("received", "other")])
    app = App("shop", broker=url)
    app.backend.store([encode_success("t1", 42, done_at=10.0)])
    app.close()
    code, out, _ = show(monkeypatch, capsys, "t1", "--json")
    told = json.loads(out)
    assert (code, told["state"], told["result"]["result"]) == (exits.OK, "SUCCESS", 42)
    assert [one["type"] for one in told["timeline"]] == [one["type"] for one in RETRIED[:5]]
    assert [one["rank"] for one in told["timeline"]] == [1, 2, 3, 4, 5]
    code, out, err = show(monkeypatch, capsys, "t1", "-b", url)
    assert (code, err) == (exits.OK, "")
    assert out.splitlines()[0] == "t1: STARTED"
    assert sum("task-" in line for line in out.splitlines()) == 5


def test_a_task_that_nobody_knows_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = show(monkeypatch, capsys, "t1")
    assert (code, out, len(err.splitlines())) == (exits.NOT_FOUND, "", 1)
    assert "unknown task t1" in err


def test_a_retry_and_what_it_retries_are_shown_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    url = f"sqlite:///{tmp_path / 'umbel.db'}"
    first = event("received", uuid="t0", name="shop.pay"), event("failed", uuid="t0", exception="broken")
    again = event("received", uuid="t1", name="shop.pay", retry_of="t0"), event("failed", uuid="t1")
    last = event("received", uuid="t2", name="shop.pay", retry_of="t1"), event("succeeded", uuid="t2")
    other = event("received", uuid="t3", name="shop.pay", args="('t0',)", retry_of="t9")
    write_file(
        tmp_path / "lake" / "events" / "dt=2026-11-15" / "hour=10" / "a.parquet", [*first, *again, other]
    )
    log(url, last)  # not recorded yet
    arguments = ("--lake", str(tmp_path / "lake"), "-b", url)
    for asked, retry_of, retried_as, line in (
        ("t0", None, ["t1"], ["t1", "t2"]),
        ("t1", "t0", ["t2"], ["t0", "t2"]),
        ("t2", "t1", [], ["t1", "t0"]),
    ):
        code, out, _ = show(monkeypatch, capsys, asked, *arguments, "--json")
        shown = json.loads(out)
        assert (code, shown["retry_of"], shown["retried_as"]) == (exits.OK, retry_of, retried_as)
        assert [one["task_id"] for one in shown["line"]] == line
        assert {one["state"] for one in shown["line"]} == (
            {"FAILURE"} if asked == "t2" else {"FAILURE", "SUCCESS"}
        )
    _, out, _ = show(monkeypatch, capsys, "t1", *arguments)
    assert "retry of: t0" in out and "retried as: t2" in out and "t2: SUCCESS" in out


def test_a_line_of_more_retries_than_are_shown_is_cut_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    url = f"sqlite:///{tmp_path / 'umbel.db'}"
    log(url, [event("received", uuid=f"t{number}", retry_of="t") for number in range(30)])
    code, out, err = show(monkeypatch, capsys, "t", "-b", url)
    assert (code, sum(line.endswith(": RECEIVED") for line in out.splitlines())) == (exits.OK, LINE_MAX - 1)
    assert "umbel: 11 more tasks of this chain of retries are not shown" in err
    _, out, _ = show(monkeypatch, capsys, "t", "-b", url, "--json")
    told = json.loads(out)
    assert (len(told["line"]), told["line_left_out"]) == (LINE_MAX - 1, 11)


def test_retries_are_found_in_the_tables_when_the_files_are_gone(tmp_path: Path) -> None:
    shop = Shop(tasks=5)
    told = [one for one in shop.rows["timeline"] if one["type"] == "task-received"]
    new, other, old = (one["task_id"] for one in (told[0], told[1], told[-1]))
    told[0]["extra"] = json.dumps({"retry_of": old})
    told[1]["extra"] = json.dumps({"retry_of": "another", "about": old})
    lake = publish(tmp_path, shop.rows)
    assert links_in_tables(lake, old) == links_in_tables(lake, new) == {(new, old)}
    assert links_in_tables(lake, other) == {(other, "another")}
    assert links_in_tables(tmp_path / "nowhere", old) == set()
