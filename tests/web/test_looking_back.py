"""Questions to the history: which pages may start one, how many of a visitor run, and what stops them."""

import asyncio
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.history.published import Story, publish
from tests.history.test_isolation import ENDLESS
from tests.waiting import until
from tests.web.serving import Served, serving
from umbel.app.app import App
from umbel.history.isolation import QueryProcess
from umbel.web import history
from umbel.web.history import PROCESSES_MAX, WAITING_MAX, LakeReaders
from umbel.web.http import Refused
from umbel.web.settings import Role

SQL = "select count(*) as n from attempts"


def served_at(home: Path, **options: Any) -> Any:
    publish(home / "lake", Story(tasks=40).rows)
    app = App("past", broker=f"sqlite:///{home / 'queue.db'}", history_lake=str(home / "lake"))
    return serving(app, home / "web.db", **options)


@pytest.fixture(scope="module")
def open_site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Without a login, as `umbel dev` serves it: any page in the browser can reach it."""
    with served_at(tmp_path_factory.mktemp("web"), login=False) as served:
        yield served


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
@pytest.mark.parametrize(
    "path",
    [
        f"/history?sql={SQL}",
        f"/history/download?sql={SQL}",
        "/history",
        "/cluster?period=day",
        "/api/v1/history",
        "/api/v1/history/rates",
        "/api/v1/history/happenings",
    ],
)
def test_a_page_of_another_site_starts_no_query(
    open_site: Served, monkeypatch: pytest.MonkeyPatch, site: str, path: str
) -> None:
    asked: list[object] = []
    monkeypatch.setattr(QueryProcess, "read", lambda *given, **_: asked.append(given))
    with open_site.client() as client:
        found = client.get(path, headers={"sec-fetch-site": site})
    assert (found.status_code, asked) == (403, [])
    assert "another site" in found.text


@pytest.mark.parametrize("site", ["same-origin", "none"])
def test_the_dashboards_own_pages_and_the_address_bar_start_queries(open_site: Served, site: str) -> None:
    with open_site.client(sec_fetch_site=site) as client:
        assert 'id="answer"' in client.get("/history", params={"sql": SQL}).text
        download = client.get("/history/download", params={"sql": SQL})
    assert (download.status_code, download.text.partition("\n")[0]) == (200, "n")


def test_where_browsers_do_not_say_which_page_asks_the_address_needs_a_proof(open_site: Served) -> None:
    """As over plain HTTP from another machine."""
    with open_site.client() as client:
        page = client.get("/history", params={"sql": SQL}).text
        assert 'id="answer"' not in page and "press Run" in page and SQL in page
        refused = client.get("/history/download", params={"sql": SQL, "proof": "0" * 64})
        assert refused.status_code == 403 and "press Run" in refused.text
        proof = re.search(r'name="proof" value="([0-9a-f]{64})"', page)
        assert proof is not None
        given = {"sql": SQL, "proof": proof[1]}
        assert 'id="answer"' in client.get("/history", params=given).text
        assert client.get("/history/download", params=given).status_code == 200


def test_programs_with_a_token_need_no_page(tmp_path: Path) -> None:
    with served_at(tmp_path) as served, served.client(served.token(Role.OPERATOR)) as client:
        assert client.get("/history/download", params={"sql": SQL}).status_code == 200
        assert client.post("/api/v1/history/sql", json={"sql": SQL}).json()["columns"] == ["n"]


def test_queries_are_audited_with_their_rows_or_why_they_were_not_run(tmp_path: Path) -> None:
    with served_at(tmp_path) as served, served.client(served.token(Role.OPERATOR)) as client:
        foreign = {"sec-fetch-site": "cross-site"}
        assert client.get("/history/download", params={"sql": SQL}).status_code == 200
        assert client.get("/history/download", params={"sql": SQL}, headers=foreign).status_code == 403
        refused, done = [entry for entry in client.get("/api/v1/audit").json() if entry["action"] == "query"]
    assert (done["status"], done["result"]) == ("done", {"rows": 1})
    assert (refused["status"], refused["result"]["rows"]) == ("failed", 0)
    assert "another site" in refused["result"]["problem"]


def test_a_query_that_cannot_be_interrupted_is_killed_and_the_dashboard_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "TIMEOUT_S", 1.0)
    with served_at(tmp_path) as served, served.client(served.token(Role.OPERATOR)) as client:
        ended = client.post("/api/v1/history/sql", json={"sql": ENDLESS})
        assert (
            ended.status_code == 422
            and "took longer than 1 s; select a shorter time or fewer rows" in ended.json()["detail"]
        )
        assert client.post("/api/v1/history/sql", json={"sql": SQL}).status_code == 200


class Held:
    """Stands for a process: reads until it is let go."""

    running = 0
    let_go = threading.Event()

    def read(self, *_: Any, **__: Any) -> str:
        Held.running += 1
        Held.let_go.wait(60)
        Held.running -= 1
        return "read"

    def close(self) -> None:
        self.let_go.set()


def test_one_query_of_a_visitor_runs_and_the_others_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "QueryProcess", Held)
    Held.let_go.clear()

    async def scenario() -> None:
        made = LakeReaders()

        def ask(visitor: str) -> asyncio.Task[str]:
            return asyncio.create_task(made.read(visitor, "lake", lambda _: None, str))

        async with asyncio.TaskGroup() as group:
            first = [ask("ann") for _ in range(WAITING_MAX + 1)]
            await until(lambda: Held.running == 1, "the first to run")
            with pytest.raises(Refused) as refused:
                await ask("ann")
            assert refused.value.problem.status == 429
            other = ask("bob")
            await until(lambda: Held.running == PROCESSES_MAX, "bob's to run beside it")
            assert [task.done() for task in (*first, other)] == [False] * (WAITING_MAX + 2)
            Held.let_go.set()
            assert set(await asyncio.gather(*first, other)) == {"read"}
            group.create_task(made.read("ann", "lake", lambda _: None, str))
        assert made._lines == {} and len(made._free) == PROCESSES_MAX

    asyncio.run(scenario())


def test_a_query_whose_caller_has_gone_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "QueryProcess", Held)
    Held.let_go.clear()

    async def scenario() -> None:
        made = LakeReaders()
        asked = asyncio.create_task(made.read("ann", "lake", lambda _: None, str))
        await until(lambda: Held.running == 1, "it to run")
        asked.cancel()
        await asyncio.wait([asked])
        await until(lambda: Held.running == 0, "it to end")
        assert asked.cancelled() and len(made._free) == PROCESSES_MAX

    asyncio.run(scenario())


def test_a_page_and_its_charts_are_read_one_after_another(open_site: Served) -> None:
    """The page asks for the figures, and its charts for the rates, as one visitor."""

    async def scenario() -> list[httpx.Response]:
        headers = {"sec-fetch-site": "same-origin"}
        async with httpx.AsyncClient(base_url=open_site.url, headers=headers, timeout=60.0) as client:
            return await asyncio.gather(
                *(client.get(path) for path in ("/history", "/api/v1/history/rates") * 3)
            )

    assert [one.status_code for one in asyncio.run(scenario())] == [200] * 6
