"""Pushes: numbered, kept for a while, merged for who comes late."""

import asyncio
from collections.abc import MutableMapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import ClientDisconnect

from tests.waiting import DEADLINE_S
from umbel.app.app import App
from umbel.monitor.model import Change
from umbel.monitor.records import redact_data, redact_text
from umbel.protocol.delivery.redaction import redact
from umbel.web import hub as hub_module
from umbel.web.dashboard import Dashboard
from umbel.web.hub import PUSHES_MAX, EventStream, Hub
from umbel.web.settings import WebSettings


@pytest.fixture
def hub(tmp_path: Path) -> Hub:
    app = App("pushing", broker=f"sqlite:///{tmp_path / 'queue.db'}")
    return Dashboard(app, WebSettings(state_file=tmp_path / "web.db")).hub


def test_what_was_missed_comes_as_one_and_what_is_not_kept_as_a_reset(hub: Hub) -> None:
    began = hub.number
    assert hub.since(began) == {} and hub.since(began - 1) is None and hub.since(began + 1) is None
    hub._add({"tasks": Change(2, ["b", "a"]), "nodes": Change(1, ["w"])})
    hub._add({"tasks": Change(1, ["b"]), "queues": Change(1, ["q"])})
    found = hub.since(began)
    assert found == {"tasks": Change(3, ["b", "a"]), "nodes": Change(1, ["w"]), "queues": Change(1, ["q"])}
    assert hub.since(began + 1) == {"tasks": Change(1, ["b"]), "queues": Change(1, ["q"])}
    for _ in range(PUSHES_MAX):
        hub._add({"tasks": Change(1, ["x"])})
    assert hub.since(began) is None
    last = hub.since(hub.number - PUSHES_MAX)
    assert last == {"tasks": Change(PUSHES_MAX, ["x"])}


def test_a_client_that_reads_slowly_gets_one_push_for_many(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        pauses: list[float] = []

        async def counted(seconds: float) -> None:
            pauses.append(seconds)

        async def still_known() -> bool:
            return True

        monkeypatch.setattr(asyncio, "sleep", counted)
        following = hub.follow(hub.number, frozenset({"tasks"}), still_known)
        assert b"retry" in await anext(following)
        assert await anext(following) == b""  # nothing has changed
        for number in range(50):
            hub._add({"tasks": Change(1, [f"t{number}"]), "nodes": Change(1, ["w"])})
        push = await anext(following)
        assert push.count(b"event:") == 1 and b'"count":50' in push and b"event: tasks" in push
        assert pauses == [hub_module.PUSH_S]  # before each push but the first: ten a second at most
        await following.aclose()

    asyncio.run(scenario())


@pytest.mark.parametrize("spec", ["2.0", "2.3", "2.4"])
@pytest.mark.parametrize("leaves", ["disconnects", "send fails"])
def test_a_stream_ends_when_its_client_leaves_under_any_server(hub: Hub, spec: str, leaves: str) -> None:
    async def still_known() -> bool:
        return True

    async def scenario() -> None:
        stream = EventStream(hub, None, frozenset({"tasks"}), visitor="ann", still_known=still_known)
        began = asyncio.Event()

        async def receive() -> dict[str, str]:
            await began.wait()
            if leaves == "send fails":
                await asyncio.Event().wait()
            return {"type": "http.disconnect"}

        async def send(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.body":
                assert hub.clients == 1
                began.set()
                if leaves == "send fails":
                    raise OSError("the connection is closed")

        async with asyncio.timeout(DEADLINE_S):
            with suppress(ClientDisconnect):
                await stream({"type": "http", "asgi": {"spec_version": spec}}, receive, send)
        assert hub.clients == 0

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("{'password': 'hunter2', 'user': 'ann'}", "{'password': ***, 'user': 'ann'}"),
        ("(user_password='x\\'y', n=1)", "(user_password=***, n=1)"),
        ('{"api_key": "k", "n": 1}', '{"api_key": ***, "n": 1}'),
        ("Authorization: Bearer abc.def", "Authorization: ***"),
        ("redis://user:pw@host/0", "redis://user:***@host/0"),
        ("{'tokens': ['a', 'b'], 'n': 1}", "{'tokens': ***"),
        ("{'secret': 'cut of", "{'secret': ***"),
        ("b'token=abc'", "b'token=***"),
        ("nothing to hide", "nothing to hide"),
    ],
)
def test_what_reads_like_a_secret_is_taken_out(text: str, clean: str) -> None:
    assert redact(text) == clean


@pytest.mark.parametrize(
    "text",
    [
        "{'x-api-key': 'hunter2'}",
        "{'api-key': 'hunter2'}",
        "{'private-key': 'hunter2'}",
        "{'api key': 'hunter2'}",
        "{'pwd': 'hunter2'}",
        "{'db_pass': 'hunter2'}",
        r'{"body": "{\"password\": \"hunter2\", \"n\": 1}"}',
        r'{"body": "{\"password\": \"a\\\"hunter2\"}"}',
        r"""'{"body": "{\\"token\\": \\"hunter2\\"}"}'""",
        "redis://:pa/hunter2@h",
        "redis://:p@hunter2@h",
        "amqp://user:hunter2",
        "('amqp://user:hunter2...',)",
        "Authorization: Token hunter2",
        "{'password': 'a\\\nhunter2'}",
        "('password', 7654321)",
        "mysql --password hunter2 --host h",
        "['--db-password', 'hunter2']",
    ],
)
def test_secrets_are_found_however_they_are_written(text: str) -> None:
    assert "hunter2" not in redact(text) and "7654321" not in redact(text) and "***" in redact(text)


@pytest.mark.parametrize(
    "text",
    [
        "http://host:8080",
        "GET http://host:8080/path failed",
        "'http://host:8080', 'ann@example.com'",
        "http://[::1]:8080/",
        "cannot reach http://host:8080: refused.",
        "compass: north, passenger=3, bypass: yes",
        "('key', 5)",
    ],
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert redact(text) == text


def test_what_is_cut_is_redacted_by_what_stood_behind_the_cut() -> None:
    assert redact_text("redis://:hunter2@host", 12) == "redis://:***" + "…"
    assert redact_text("x" * 10 + "password='" + "y" * 2000, 30) == "x" * 10 + "password=***" + "…"
    assert redact_text("x" * 30, 30) == "x" * 30


def test_data_is_redacted_by_key_and_cut() -> None:
    given = {"password": "x", "empty_token": "", "list": [{"secret": 1}, "t" * 50], "n": 1, "none": None}
    found = redact_data(given, 10)
    assert found == {
        "password": "***",
        "empty_token": "",
        "list": [{"secret": "***"}, "t" * 10 + "…"],
        "n": 1,
        "none": None,
    }
    deep: list[object] = []
    for _ in range(100):
        deep = [deep]
    assert "***" in str(redact_data(deep))
    assert len(redact("x" * 1_000_000)) == 65_536
