"""What the site hands out, asked without a server: hidden, bounded, and no fault for any input."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from threading import get_ident
from time import time
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from tests.web.serving import serving
from umbel.app.app import App
from umbel.brokers.interface import DeadLetter, Refused
from umbel.events.view import TaskRecord
from umbel.history.markup import instant
from umbel.monitor.cluster import KnownCluster
from umbel.monitor.records import LIST_MAX, TaskFilter, redact_task
from umbel.protocol.delivery.trust import Signed
from umbel.web.actions import Retry, Revoke, Terminate
from umbel.web.application import application
from umbel.web.dashboard import Dashboard
from umbel.web.exporters import as_flower, tasks_of
from umbel.web.http import Refused as RefusedByWeb
from umbel.web.http import Visitor
from umbel.web.pages.labels import clock_time, iso, local
from umbel.web.performer import ONLY_RETAINED, letters_by_name
from umbel.web.settings import Role, WebSettings
from umbel.wire.control import texts
from umbel.wire.event import encode_event
from umbel.wire.message import Message
from umbel.wire.retried import retry_of

ANN = Visitor(name="ann", role=Role.ADMIN, csrf="", address="127.0.0.1")


def told(type_name: str, **fields: Any) -> bytes:
    envelope = {"type": type_name, "hostname": "w@h", "pid": 1, "clock": 3, "timestamp": time()}
    return encode_event({**envelope, **fields})


def app_in(home: Path, **settings: Any) -> App:
    app = App("answering", broker=f"sqlite:///{home / 'queue.db'}", **settings)

    @app.task(name="pay", sensitive=("card",))
    def pay(card: str, note: str = "") -> None:
        pass

    return app


@asynccontextmanager
async def site_in(home: Path, **settings: Any) -> AsyncIterator[Dashboard]:
    site = Dashboard(app_in(home, **settings), WebSettings(state_file=home / "web.db"))
    await site._broker.open()
    try:
        yield site
    finally:
        await site._broker.close()
        await site.stop()


def test_arguments_that_celery_does_not_mask_are_not_shown_nor_found(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with site_in(tmp_path) as site:
            sent = {"name": "pay", "queue": "celery", "retries": 0}
            model = site.cluster.model
            model.take(
                told("task-sent", uuid="open", args="('4111',)", kwargs="{'note': 'x'}", **sent), time()
            )
            model.take(told("task-sent", uuid="masked", args="(***, 'blue')", kwargs="{}", **sent), time())
            shown = {one.uuid: (one.args, one.kwargs) for one in site.cluster.tasks(TaskFilter()).tasks}
            assert shown == {"open": ("***", "***"), "masked": ("(***, 'blue')", "{}")}
            detail = site.task("open")
            assert detail is not None and detail.task.args == "***" and not detail.as_call
            found = model.state.task("open")
            assert (
                found is not None
                and as_flower(redact_task(found, LIST_MAX, site.cluster.hides))["args"] == "***"
            )
            assert (
                site.cluster.count(TaskFilter(text="4111")) == 0
                and site.cluster.count(TaskFilter(text="blue")) == 1
            )

            def send_by_name() -> None:  # as a client does that has no definition of the task
                with App("client", broker=site.app.settings.broker) as client:
                    client.send_task("pay", ["4111"])

            await asyncio.to_thread(send_by_name)
            (waiting,) = await site.peek("celery")
            assert (waiting.task, waiting.args, waiting.kwargs) == ("pay", "***", "***")

    asyncio.run(scenario())


def test_what_an_election_ended_with_is_redacted(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with site_in(tmp_path) as site:
            ended = {"eid": "e", "topic": "t", "term": 1, "winner": "w@h", "phase": "done"}
            site.cluster.model.take(told("worker-elected", outcome="token=hunter2", **ended), time())
            (election,) = site.cluster.elections()
            assert election.outcome == "token=***"

    asyncio.run(scenario())


@asynccontextmanager
async def browser_in(home: Path, role: str = "admin") -> AsyncIterator[httpx.AsyncClient]:
    settings = WebSettings(state_file=home / "web.db", authenticate=lambda _scope: ("ann", role))
    site = Dashboard(app_in(home), settings)
    transport = httpx.ASGITransport(app=application(site))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:5555") as client:
        csrf = (await client.get("/api/v1/me")).json()["csrf"]
        client.headers.update({"x-csrf-token": csrf, "origin": "http://127.0.0.1:5555"})
        try:
            yield client
        finally:
            await site.stop()


def test_no_input_is_a_fault(tmp_path: Path) -> None:
    paths = {
        "/audit?before=²": 200,
        "/audit?before=99999999999999999999": 200,
        "/tasks?since=1e300": 200,
        "/tasks?since=nan": 200,
        "/tasks?since=0001-01-01T00:00": 200,
        "/api/v1/tasks?since=nan": 400,
        f"/cluster?ago={'9' * 5000}": 200,
        "/history?mark=yesterday": 200,
        "/confirm?action=retry&match=since%3Dnan": 200,
    }

    async def scenario() -> None:
        async with browser_in(tmp_path) as client:
            for path, status in paths.items():
                assert (await client.get(path)).status_code == status, path
            for depth in (70, 800, 100_000):
                body = '{"action": "start_election", "id": "e", "topic": "t", "argument": %s%s}'
                asked = client.post(
                    "/api/v1/actions",
                    content=body % ("[" * depth, "]" * depth),
                    headers={"content-type": "application/json"},
                )
                answer = await asked
                assert answer.status_code == 400 and "nested" in answer.text, depth

    asyncio.run(scenario())


def test_a_fault_says_nothing_of_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The answer is the same for any fault; the server's log has the rest."""

    def broken(_site: object) -> None:
        raise RuntimeError("detail of the inside")

    monkeypatch.setattr(KnownCluster, "overview", broken)
    app = app_in(tmp_path)
    with serving(app, tmp_path / "web.db") as served:
        token = served.token(Role.VIEWER)
        for path in ("/", "/api/v1/overview"):
            with served.client(token, accept="text/html") as client:  # the connection ends with a fault
                answer = client.get(path)
            assert (answer.status_code, answer.json()["title"]) == (500, "Internal error")
            assert "inside" not in answer.text and "Traceback" not in answer.text
        with served.client(token) as client:
            assert client.get("/api/v1/me").status_code == 200
    assert "detail of the inside" in capfd.readouterr().err


def test_times_that_no_calendar_has_are_not_shown() -> None:
    for at in (1e300, float("nan"), float("inf"), -1e15):
        assert (instant(at), clock_time(at), local(at), iso(at)) == ("–", "–", "", "")
    assert instant(0.0) == "1970-01-01 00:00:00"


def sent(site: Dashboard, uuid: str, clock: int, **fields: Any) -> None:
    body = told("task-received", uuid=uuid, name="pay", retries=0, **{"clock": clock, **fields})
    site.cluster.model.take(body, time())


def test_flowers_pages_make_records_of_what_they_show_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []

    async def scenario() -> None:
        async with site_in(tmp_path) as site:
            for number in range(300):
                sent(site, f"t{number}", number + 1, timestamp=1000.0 - number)
            waiting = told("task-sent", uuid="waiting", name="sent.only", retries=0)
            site.cluster.model.take(waiting, time())  # never received, so the lowest by that
            state = site.cluster.model.state
            real = state.task

            def note(uuid: str) -> TaskRecord | None:
                made.append(uuid)
                return real(uuid)

            monkeypatch.setattr(state, "task", note)

            def page(**given: str) -> list[str]:
                return [one.uuid for one in tasks_of(site.cluster, given)]

            assert page(offset="250", limit="2", taskname="pay") == ["t49", "t48"]
            assert page(limit="2", sort_by="received") == ["waiting", "t299"]
            assert page(offset="1", limit="2", sort_by="-received") == ["t1", "t2"]
            assert page(limit="1", sort_by="-started") and page(offset="100000") == []
            assert len(made) == 7

    asyncio.run(scenario())


def test_what_is_sent_again_is_read_on_the_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with site_in(tmp_path) as site:
            sent(site, "t1", 1, args="(***,)", kwargs="{}")
            site.cluster.model.take(
                told("task-received", uuid="t2", name="x.y", args="(1,)", retries=0), time()
            )
            state, threads = site.cluster.model.state, list[int]()
            real = state.task

            def note(uuid: str) -> TaskRecord | None:
                threads.append(get_ident())
                return real(uuid)

            monkeypatch.setattr(state, "task", note)
            result = await site.act(ANN, Retry(ids=["t1", "t2", "t3"]))
            assert len(result.sent) == 1 and result.refused.keys() == {"t1", "t3"}
            assert set(threads) == {get_ident()}

    asyncio.run(scenario())


def test_with_keys_nothing_is_sent_again_that_only_events_tell_of(tmp_path: Path) -> None:
    """Anyone who can write to the broker can send an event; the dashboard would sign what it says."""

    async def scenario() -> None:
        async with site_in(tmp_path, signing_keys=["k:" + "s" * 32], signing_cluster="here") as site:
            call = {"name": "anything", "args": "('evil',)", "kwargs": "{}", "queue": "celery", "retries": 0}
            for task_id, event in (("forged", "task-succeeded"), ("failed", "task-failed")):
                site.cluster.model.take(told("task-sent", uuid=task_id, **call), time())
                site.cluster.model.take(told(event, uuid=task_id, exception="e", runtime=0.1), time())
            signer = site.app.signing_cluster.signer()
            assert signer is not None
            ids = ("kept", "planted")
            kept = [site.app.prepare("pay", ["1"], {}, {"task_id": one}).outgoing for one in ids]
            headers = b'{"task":"pay","id":"unsigned"}'
            forged = Message(headers, b"[[],{},{}]", correlation_id="unsigned")
            unsigned = replace(kept[0], message=forged)
            stored = signer.vouched("it failed", kept[0].message, "celery", time())
            parts = [Refused(kept[0], stored), Refused(kept[1], "it failed"), Refused(unsigned, "it failed")]
            await site._broker.keep_failed(parts)
            result = await site.act(ANN, Retry(ids=["forged", "failed", *ids, "unsigned"]))
            assert result.count == 1
            assert result.refused.keys() == {"forged", "failed", "planted", "unsigned"}
            assert result.refused["forged"] == result.refused["failed"] == ONLY_RETAINED
            assert "no worker vouches" in result.refused["planted"]
            assert "not verified (unsigned" in result.refused["unsigned"]
            (sent,) = await site._broker.peek("celery", 10)
            assert isinstance(signer.check_task(sent.message, "celery")[0], Signed)
            assert retry_of(sent.message.headers) == "kept"
            detail = site.task("forged")
            assert detail is not None and not detail.can_retry and "signing_keys" in detail.why_not

    asyncio.run(scenario())


@pytest.mark.parametrize("action", [Revoke, Terminate, Retry])
def test_an_action_on_tasks_that_names_nodes_is_refused(tmp_path: Path, action: type[Any]) -> None:
    async def scenario() -> None:
        async with site_in(tmp_path) as site:
            with pytest.raises(RefusedByWeb, match="nodes"):
                await site.act(ANN, action(ids=["t"], nodes=["w@h"]))

    asyncio.run(scenario())


def test_the_id_of_a_task_does_not_stand_for_another_letter() -> None:
    """Ids of tasks are chosen by clients: one may be the number of a letter."""
    letters = [
        DeadLetter(number, "q", Message(b"", b"", correlation_id=task_id), "", 1, 0.0)
        for number, task_id in ((1, "t1"), (2, "1"), (3, "4"), (4, "t4"))
    ]
    for known in (letters, letters[::-1]):
        assert letters_by_name(known) == {"1": 1, "2": 2, "3": 3, "4": 4, "t1": 1, "t4": 4}


def test_a_refusal_is_no_list_of_tasks() -> None:
    assert texts({"error": "not allowed"}) == [] == texts(None)
    assert texts(["a.b", "c"]) == ["a.b", "c"]


def test_all_that_match_are_offered_where_there_is_a_filter(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with browser_in(tmp_path) as client:
            assert "Retry all" not in (await client.get("/tasks")).text
            assert "Retry all" in (await client.get("/tasks?name=x")).text

    asyncio.run(scenario())
