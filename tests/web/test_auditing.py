"""The audit: bounded whoever asks, private, and true about what was done."""

import asyncio
import sqlite3
from collections import deque
from contextlib import closing
from pathlib import Path
from time import time

import msgspec
import pytest

from umbel.app.app import App
from umbel.monitor.records import Mark
from umbel.web import audit, journal
from umbel.web.actions import AuditEntry, Purge, Retry, Revoke, StartElection
from umbel.web.audit import LISTED_MAX, entry_of, note_of
from umbel.web.dashboard import Dashboard
from umbel.web.http import Forbidden, Visitor
from umbel.web.journal import Journal
from umbel.web.settings import Role, WebSettings

ANN = Visitor(name="ann", role=Role.ADMIN, csrf="", address="127.0.0.1")
BOB = Visitor(name="bob", role=Role.VIEWER, csrf="", address="127.0.0.1")
ENTRY = AuditEntry(
    id=0, at=1.0, who="a", role="admin", address="", action="x", target="", arguments={}, status="sent"
)


QUERY = note_of("query", "ann", "operator", "")


def dashboard_in(home: Path) -> Dashboard:
    app = App("audited", broker=f"sqlite:///{home / 'queue.db'}")
    return Dashboard(app, WebSettings(state_file=home / "web.db"))


def test_what_was_refused_pushes_out_nothing_that_was_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(audit.ROOMS, "action", 3)
    monkeypatch.setitem(audit.ROOMS, "refused", 2)
    kept = Journal(tmp_path / "web.db")
    done = [kept.note(ENTRY) for _ in range(2)]
    refused = [kept.note(msgspec.structs.replace(ENTRY, status="refused")) for _ in range(10)]
    done.append(kept.note(ENTRY))
    assert [one.id for one in kept.audit(limit=100)] == sorted([*done, *refused[-2:]], reverse=True)
    assert [one.id for one in kept.audit(limit=1, before=done[-1])] == [refused[-1]]
    kept.close()


def test_nobody_pushes_out_entries_of_another_kind_or_role(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for room in audit.ROOMS:
        monkeypatch.setitem(audit.ROOMS, room, 3)
    kept = Journal(tmp_path / "web.db")
    wanted = [kept.note(ENTRY), kept.note(note_of("login", "root", "admin", "")), kept.note(QUERY)]
    floods = [
        *(note_of(action, "bob", "viewer", "") for action in ("login", "logout", "query")),
        *(note_of(action, "x", "", "") for action in ("failed_login", "locked_out", "refused_request")),
        msgspec.structs.replace(ENTRY, status="refused"),
    ]
    for flood in floods:
        for _ in range(10):
            kept.note(flood)
    found = kept.audit(limit=100)
    assert set(wanted) < {one.id for one in found}
    assert len(found) == len(wanted) + 3 * 5  # logins, logouts, queries, failures, refusals
    kept.close()


def test_a_file_of_an_earlier_version_is_taken_over(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "web.db")) as old:
        old.executescript(
            "CREATE TABLE audit (id INTEGER PRIMARY KEY AUTOINCREMENT, at REAL NOT NULL, body BLOB NOT NULL);"
            "CREATE TABLE refused (id INTEGER PRIMARY KEY, body BLOB NOT NULL);"
        )
        refused = msgspec.structs.replace(ENTRY, status="refused", who="bob")
        old.execute("INSERT INTO audit VALUES (1, 1.0, ?)", (msgspec.json.encode(ENTRY),))
        old.execute("INSERT INTO refused VALUES (2, ?)", (msgspec.json.encode(refused),))
        old.commit()
    for _ in range(2):
        kept = Journal(tmp_path / "web.db")
        assert [(one.id, one.who, one.status) for one in kept.audit(limit=9)][-2:] == [
            (2, "bob", "refused"),
            (1, "a", "sent"),
        ]
        assert kept.note(ENTRY) > 2
        kept.close()


def test_a_refused_action_is_written_without_its_arguments(tmp_path: Path) -> None:
    async def scenario() -> None:
        site = dashboard_in(tmp_path)
        with pytest.raises(Forbidden):
            await site.act(BOB, Revoke(ids=["i" * 1000] * 1000))
        (entry,) = site.journal.audit(limit=10)
        assert (entry.status, entry.who, entry.arguments) == ("refused", "bob", {})
        assert entry.target.endswith(" and 999 more") and len(entry.target) <= 200
        await site.stop()

    asyncio.run(scenario())


def test_an_entry_names_some_and_counts_all(tmp_path: Path) -> None:
    async def scenario() -> None:
        site = dashboard_in(tmp_path)
        unknown = [f"t{number}" for number in range(500)]
        result = await site.act(ANN, Retry(ids=unknown))
        assert len(result.refused) == 500
        (entry,) = site.journal.audit(limit=10)
        assert entry.arguments["ids"] == unknown[:LISTED_MAX] and entry.arguments["ids_count"] == 500
        assert entry.result is not None
        assert len(entry.result["refused"]) == LISTED_MAX and entry.result["refused_count"] == 500
        await site.stop()

    asyncio.run(scenario())
    large = entry_of(ANN, StartElection(id="e", topic="t", argument=[["x" * 1000] * 1000]), "sent")
    assert len(msgspec.json.encode(large)) < 10_000
    assert entry_of(ANN, Purge(queue="celery"), "sent").arguments["queue"] == "celery"


def test_no_file_of_the_dashboard_is_readable_by_others(tmp_path: Path) -> None:
    path = tmp_path / "web.db"
    for _ in range(2):
        kept = Journal(path)
        kept.note(ENTRY)
        found = {one.name: one.stat().st_mode & 0o777 for one in tmp_path.glob("web.db*")}
        assert found == dict.fromkeys(["web.db", "web.db-wal", "web.db-shm"], 0o600)
        for name in found:  # as an earlier version left them
            (tmp_path / name).chmod(0o644)
        copies = {name: (tmp_path / name).read_bytes() for name in found}
        kept.close()
        for name, body in copies.items():
            (tmp_path / name).write_bytes(body)
            (tmp_path / name).chmod(0o644)


def test_what_was_done_is_answered_though_its_outcome_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_entry: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    async def scenario() -> None:
        site = dashboard_in(tmp_path)
        monkeypatch.setattr(site.journal, "finish", full)
        result = await site.act(ANN, Retry(ids=["unknown"]))
        assert result.audit_id == 1 and "unknown" in result.refused
        assert [one.status for one in await site.audit.entries()] == ["sent"]
        await site.stop()

    asyncio.run(scenario())


def test_what_could_not_be_written_is_written_next_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_given: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    async def scenario() -> None:
        site, now = dashboard_in(tmp_path), time()
        site.feed.received(b"first", now)
        site.cluster.model.mark(Mark(at=now, text="deploy"))
        with monkeypatch.context() as broken:
            broken.setattr(site.journal, "write_hour", full)
            await site._write()
        site.feed.received(b"second", now)
        await site._write()
        assert [part for _, part in site.journal.events(0)] == [[b"first", b"second"]]
        assert [one.at for one in site.journal.happened(0)] == [now]
        await site.stop()

    asyncio.run(scenario())


def test_what_waits_to_be_written_is_bounded_in_messages_and_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "MESSAGES_MAX", 3)
    monkeypatch.setattr(journal, "BYTES_MAX", 10)
    waiting = journal.JournalBuffer()
    for body in (b"a", b"b", b"c", b"d"):
        waiting.add(1.0, body)
    taken = waiting.take()
    assert [body for _, body in taken] == [b"b", b"c", b"d"]
    waiting.add(2.0, b"123456789")
    waiting.give_back(taken)
    assert [body for _, body in waiting.take()] == [b"d", b"123456789"]
    marks = deque([3, 4], maxlen=3)
    journal.give_back(marks, [1, 2])
    assert list(marks) == [2, 3, 4]
