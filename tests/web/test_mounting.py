"""The dashboard inside another application: FastAPI, Starlette, or behind Django's ASGI handler."""

import asyncio
from pathlib import Path
from typing import Any

import fastapi
import httpx
import pytest
from starlette.applications import Starlette
from starlette.routing import Mount

from umbel.app.app import App
from umbel.errors import ConfigurationError
from umbel.web import asgi

Asked = tuple[str, dict[str, str]]


def asked(outer: Any, *questions: Asked) -> list[httpx.Response]:
    async def ask() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app=outer)
        async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
            return [await client.get(path, headers=headers) for path, headers in questions]

    return asyncio.run(ask())


def embedded(home: Path, **options: Any) -> Any:
    app = App("mounted", broker=f"sqlite:///{home / 'queue.db'}")
    return asgi(app, state_file=home / "web.db", **options)


def who(scope: Any) -> tuple[str, str] | None:
    """As an application would that has logged its users in already."""
    named = dict(scope["headers"]).get(b"x-user", b"").decode()
    return (named, "operator") if named else None


@pytest.mark.parametrize("framework", ["fastapi", "starlette", "dispatcher"])
def test_it_answers_below_its_path_and_asks_the_application_who_it_is(tmp_path: Path, framework: str) -> None:
    inner = embedded(tmp_path, authenticate=who)
    outer: Any
    if framework == "fastapi":
        outer = fastapi.FastAPI()
        outer.mount("/ops", inner)
    elif framework == "starlette":
        outer = Starlette(routes=[Mount("/ops", inner)])
    else:  # as an asgi.py of Django has it: a path more, and no lifespan

        async def outer(scope: Any, receive: Any, send: Any) -> None:
            await inner({**scope, "root_path": "/ops"}, receive, send)

    ann = {"x-user": "ann"}
    known, missing, document, unknown = asked(
        outer,
        ("/ops/api/v1/me", ann),
        ("/ops/api/v1/x", ann),
        ("/ops/api/openapi.json", ann),
        ("/ops/tasks", {"accept": "text/html"}),
    )
    assert (known.status_code, known.json()["name"], known.json()["role"]) == (200, "ann", "operator")
    assert missing.status_code == 404 and document.json()["servers"] == [{"url": "/ops"}]
    assert (unknown.status_code, unknown.headers["location"]) == (303, "/ops/login")


def test_an_unknown_option_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="known: host"):
        embedded(tmp_path, colour="red")


async def awaited(_scope: Any) -> tuple[str, str]:
    return "ann", "admin"


RAISED = "authenticate function of the dashboard raised an exception; request refused"
RETURNED = "authenticate function of the dashboard must return (name, role) or None; request refused"


@pytest.mark.parametrize(
    ("authenticate", "logged"),
    [
        (
            lambda scope: scope["session"]["user"],
            RAISED,
        ),
        (
            lambda _scope: "ann",
            RETURNED,
        ),
        (
            lambda _scope: ("ann", "boss"),
            RETURNED,
        ),
        (awaited, RETURNED),
    ],
)
def test_an_application_that_cannot_say_who_asks_is_told_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, authenticate: Any, logged: str
) -> None:
    (answered,) = asked(embedded(tmp_path, authenticate=authenticate), ("/tasks", {"accept": "text/html"}))
    assert answered.status_code == 503 and "authenticate function failed" in answered.json()["detail"]
    assert [one.message for one in caplog.records if one.name == "umbel.web"] == [logged]
