"""A dashboard served for tests: uvicorn in a thread, on any free port of this machine."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import time
from typing import Any
from urllib.parse import urlsplit

import httpx

from tests.waiting import wait_until
from umbel.app.app import App
from umbel.web.credentials import Token, digest_of, make_token
from umbel.web.server import Server
from umbel.web.settings import Role, WebSettings

TIMEOUT_S = 30.0


class Served:
    """`url` without a path; `first_url` carries the one-time token."""

    def __init__(self, server: Server, first_url: str) -> None:
        self.server, self.first_url = server, first_url
        self.dashboard = server.dashboard
        parts = urlsplit(first_url)
        self.url = f"{parts.scheme}://{parts.netloc}"

    def token(self, role: Role, *, name: str = "", expires_at: float | None = None) -> str:
        made = make_token()
        self.dashboard.journal.add_token(
            Token(
                name=name or f"{role}-{made[-6:]}",
                digest=digest_of(made),
                role=role,
                created_at=time(),
                expires_at=expires_at,
            )
        )
        return made

    def client(self, token: str = "", **headers: str) -> httpx.Client:
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        if token:
            given["authorization"] = f"Bearer {token}"
        # No TLS: with `verify`, each client would read all certificates of authorities.
        return httpx.Client(base_url=self.url, headers=given, timeout=TIMEOUT_S, verify=False)

    @contextmanager
    def browser(self, role: Role = Role.ADMIN) -> Iterator[httpx.Client]:
        """Logged in with a session, and sending what the pages send with a change."""
        with self.client() as client:
            logged_in = client.post("/session", data={"token": self.token(role)})
            assert logged_in.status_code == 303, logged_in.text
            csrf = client.get("/api/v1/me").json()["csrf"]
            client.headers.update({"x-csrf-token": csrf, "origin": self.url})
            yield client

    @contextmanager
    def stream(self, token: str, *headers: str, read_bytes: int = 65_536) -> Iterator[socket.socket]:
        """A raw connection that has asked for the stream."""
        host, port = self.url.removeprefix("http://").split(":")
        with socket.socket() as raw:
            raw.settimeout(TIMEOUT_S)
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, read_bytes)
            raw.connect((host, int(port)))
            lines = ["GET /api/v1/stream HTTP/1.1", "Host: x", f"Authorization: Bearer {token}", *headers]
            raw.sendall("\r\n".join([*lines, "", ""]).encode())
            yield raw


@contextmanager
def serving(app: App, state_file: Path, **options: Any) -> Iterator[Served]:
    opened: list[str] = []
    given: dict[str, Any] = {"port": 0, **options}
    server = Server(app, WebSettings(state_file=state_file, **given), opened.append)
    thread = threading.Thread(target=server.run, name="web", daemon=True)
    thread.start()
    try:
        wait_until(lambda: opened or not thread.is_alive(), what="the dashboard to be served")
        assert opened, "the dashboard ended at its start"
        yield Served(server, opened[0])
    finally:
        server.should_exit = True
        thread.join(TIMEOUT_S)
        assert not thread.is_alive(), "the dashboard does not stop"
