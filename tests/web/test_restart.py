"""A dashboard that is killed and started again: the audit, the last hour, and what was heard."""

import asyncio
import sqlite3
from pathlib import Path
from time import time
from typing import Any

import pytest

from tests.servers.redis import RedisServer
from tests.waiting import until
from umbel.app.app import App
from umbel.errors import ConfigurationError
from umbel.monitor.rates import Step
from umbel.monitor.records import Happening, Mark, TaskFilter
from umbel.web import audit
from umbel.web import journal as journal_module
from umbel.web.actions import AuditEntry, MarkMoment, Purge
from umbel.web.credentials import Token
from umbel.web.dashboard import Dashboard
from umbel.web.http import Refused, Visitor
from umbel.web.journal import Journal
from umbel.web.performer import Performer
from umbel.web.settings import Role, WebSettings
from umbel.wire.event import encode_event

ANN = Visitor(name="ann", role=Role.ADMIN, csrf="", address="127.0.0.1")


def dashboard_in(home: Path) -> Dashboard:
    app = App("again", broker=f"sqlite:///{home / 'queue.db'}")
    return Dashboard(app, WebSettings(state_file=home / "web.db"))


def told(type_name: str, uuid: str, **fields: Any) -> bytes:
    envelope = {"type": type_name, "uuid": uuid, "hostname": "w@h", "pid": 1, "clock": 3, "timestamp": time()}
    return encode_event({**envelope, "retries": 0, **fields})


def test_the_last_hour_and_the_audit_are_shown_again_after_a_kill(tmp_path: Path) -> None:
    async def before() -> int:
        site = dashboard_in(tmp_path)
        await site.start()
        await until(lambda: not site.feed.problem, "what is shown")
        site.feed.received(body := told("task-failed", "t1", exception="ValueError()"), time())
        site.cluster.model.take(body, time())
        site.cluster.model.happened(Happening(at=time(), kind="lost", subject="w@h"))
        await site.act(ANN, MarkMoment(text="v1.4"))
        await until(lambda: site.cluster.model.marks, "what is shown")
        result = await site.act(ANN, Purge(queue="celery"))
        await site._write()
        running, site._running = site._running, None
        assert running is not None
        running.cancel()  # nothing is closed in good order
        await asyncio.wait([running])
        return result.audit_id

    async def after(audit_id: int) -> None:
        site = dashboard_in(tmp_path)
        await site.start()
        await until(lambda: site.task("t1") is not None, "what is shown")
        assert [one.uuid for one in site.cluster.tasks(TaskFilter(state="FAILURE")).tasks] == ["t1"]
        assert sum(one or 0 for one in site.cluster.rates().failed) == 1  # joined, not counted again
        assert [one.text for one in site.cluster.rates().marks] == ["v1.4"]
        assert [one.kind for one in site.cluster.happenings()] == ["lost"]
        newest, older = await site.audit.entries()
        assert (newest.id, newest.action, newest.status, newest.who) == (audit_id, "purge", "done", "ann")
        assert older.action == "mark"
        await site.stop()

    asyncio.run(after(asyncio.run(before())))


def test_an_action_is_on_disk_before_it_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        site = dashboard_in(tmp_path)
        await site.start()
        await until(lambda: not site.feed.problem, "what is shown")
        seen: list[str] = []

        async def killed(_performer: Performer, _action: object) -> dict[str, Any]:
            other = sqlite3.connect(tmp_path / "web.db")
            seen.extend(body.decode() for (body,) in other.execute("SELECT body FROM audit"))
            other.close()
            raise asyncio.CancelledError

        monkeypatch.setattr(Performer, "perform", killed)
        with pytest.raises(asyncio.CancelledError):
            await site.act(ANN, Purge(queue="celery"))
        assert len(seen) == 1 and '"status":"sent"' in seen[0]
        await site.stop()

    asyncio.run(scenario())


def test_nothing_is_done_that_cannot_be_audited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        site = dashboard_in(tmp_path)

        def full(_entry: object) -> int:
            raise sqlite3.OperationalError("database or disk is full")

        monkeypatch.setattr(site.journal, "note", full)
        with pytest.raises(Refused, match="cannot be written to the audit log"):
            await site.act(ANN, Purge(queue="celery"))
        await site.stop()

    asyncio.run(scenario())


def test_a_broker_that_is_away_is_waited_for_and_said(tmp_path: Path) -> None:
    async def scenario() -> None:
        app = App("away", broker="redis://127.0.0.1:1/0")
        site = Dashboard(app, WebSettings(state_file=tmp_path / "web.db"))
        await site.start()
        await until(lambda: site.feed.problem not in ("", "connecting"), "what is shown")
        health = site.cluster.overview().health
        assert health.level == "bad" and "receives no events from the cluster" in health.sentence
        result = await site.act(ANN, Purge(queue="celery"))
        assert not result.done and result.problem
        assert (await site.audit.entries())[0].status == "failed"
        await site.stop()

    asyncio.run(scenario())


def test_a_broker_that_restarts_is_said_and_survived(tmp_path: Path) -> None:
    server = RedisServer(tmp_path)
    server.start()

    async def scenario() -> None:
        site = Dashboard(App("again", broker=server.url), WebSettings(state_file=tmp_path / "web.db"))
        await site.start()
        await until(lambda: not site.feed.problem, "what is shown")
        await asyncio.to_thread(server.stop)
        await until(lambda: site.feed.problem, "what is shown")
        assert site.cluster.overview().health.level == "bad"
        await asyncio.to_thread(server.start)
        await until(lambda: not site.feed.problem, "what is shown")

        async def is_marked() -> bool:
            await site.act(ANN, MarkMoment(text="back"))
            return bool(site.cluster.model.marks)

        async with asyncio.timeout(30):
            while not await is_marked():  # what is told while it listens again
                pass
        await site.stop()

    try:
        asyncio.run(scenario())
    finally:
        server.stop()


def test_the_file_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "EVENTS_BYTES_MAX", 2000)
    monkeypatch.setattr(journal_module, "EVENTS_AT_ONCE", 2)
    monkeypatch.setitem(audit.ROOMS, "action", 10)
    kept, now = Journal(tmp_path / "web.db"), time()
    old = [(now - 4000, b"old"), (now - 4000, b"older")]
    kept.write_hour(old, [Step(int(now) - 4000)], [Mark(at=now - 4000, text="old")], now)
    assert not list(kept.events(0)) and not kept.steps(0) and not kept.happened(0)
    bodies = [bytes(f"{number} {hash(str(number))}" * 10, "ascii") for number in range(100)]
    kept.write_hour([(now, one) for one in bodies], [Step(int(now), done=3)], [Mark(at=now, text="x")], now)
    found = [body for _, part in kept.events(0) for body in part]
    assert 2 <= len(found) < 100 and set(found) <= set(bodies[-len(found) :])
    entry = AuditEntry(
        id=0, at=now, who="a", role="admin", address="", action="x", target="", arguments={}, status="done"
    )
    for _ in range(30):
        kept.note(entry)
    assert [one.id for one in kept.audit(limit=100)] == list(range(30, 20, -1))
    assert [one.id for one in kept.audit(limit=2, before=25)] == [24, 23]
    kept.close()


def test_damaged_rows_are_passed_over_and_a_fault_is_started_again_from(tmp_path: Path) -> None:
    kept, now = Journal(tmp_path / "web.db"), time()
    kept.write_hour([(now, told("task-failed", "t1"))], [Step(int(now), failed=1)], [], now)
    with kept._file:
        kept._file.execute("INSERT INTO heard (at, size, body) VALUES (?, 3, X'6f6464')", (now,))
        kept._file.execute("INSERT INTO steps VALUES (?, X'6f6464')", (int(now) + 5,))
        kept._file.execute("INSERT INTO happened (at, kind, body) VALUES (?, 'Mark', X'7b7d')", (now,))
    kept.close()

    async def scenario() -> None:
        site = dashboard_in(tmp_path)
        await site.start()
        await until(lambda: site.task("t1") is not None and not site.feed.problem, "what is shown")
        assert site._running is not None
        site._running.cancel()
        await asyncio.wait([site._running])
        await site.start()  # as the next request does
        await until(lambda: not site.feed.problem, "what is shown")
        await site.act(ANN, MarkMoment(text="again"))
        await until(lambda: site.cluster.model.marks, "what is shown")
        await site.stop()

    asyncio.run(scenario())


def test_tokens_are_hashed_and_have_one_name_each(tmp_path: Path) -> None:
    kept = Journal(tmp_path / "web.db")
    token = Token(name="ci", digest="d", role=Role.VIEWER, created_at=1.0)
    kept.add_token(token)
    with pytest.raises(ConfigurationError, match="already"):
        kept.add_token(token)
    assert kept.tokens() == [token] and kept.remove_token("ci") and not kept.remove_token("ci")
    kept.close()
    with pytest.raises(ConfigurationError, match="--state"):
        Journal(tmp_path / "no" / "web.db")
