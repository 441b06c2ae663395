"""Who may do what (web.md 4 and 6): each way in that must stay shut, tried against a served dashboard."""

import resource
import socket
import sqlite3
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from time import time

import pytest

from tests.waiting import wait_until
from tests.web.serving import Served, serving
from umbel.app.app import App
from umbel.errors import ConfigurationError
from umbel.web import credentials, hub, settings, visitors
from umbel.web.actions import AuditEntry
from umbel.web.credentials import FailureLimit
from umbel.web.server import Server
from umbel.web.settings import Role, WebSettings, check

PURGE = {"action": "purge", "queue": "celery"}
CLIENTS_MAX = 5


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    home = tmp_path_factory.mktemp("web")
    app = App("guarded", broker=f"sqlite:///{home / 'queue.db'}")
    with serving(app, home / "web.db", clients_max=CLIENTS_MAX) as found:
        yield found


@pytest.fixture(autouse=True)
def quick_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong tokens of a locked-out address are answered after a second."""
    monkeypatch.setattr(visitors, "TOGETHER_S", 0.01)


def test_without_a_token_programs_are_refused_and_browsers_sent_to_log_in(served: Served) -> None:
    with served.client() as client:
        refused = client.get("/api/v1/nodes")
        assert refused.status_code == 401
        assert refused.headers["content-type"] == "application/problem+json"
        sent = client.get("/tasks", headers={"accept": "text/html"})
        assert (sent.status_code, sent.headers["location"]) == (303, "/login")
        assert client.get("/metrics").status_code == 401
        assert client.post("/api/v1/actions", json=PURGE).status_code == 401


def test_a_wrong_or_ended_token_is_refused_and_guessing_is_slowed(served: Served) -> None:
    ended = served.token(Role.ADMIN, expires_at=time() - 1)
    with served.client(ended) as client:
        assert client.get("/api/v1/me").status_code == 401
    with served.client("umbel_wrong") as client:
        answers = [client.get("/api/v1/me").status_code for _ in range(30)]
    assert answers[0] == 401 and answers[-1] == 429
    served.dashboard.visitors.failures = FailureLimit()


def test_a_removed_token_is_worth_nothing_at_once(served: Served) -> None:
    with served.client(served.token(Role.VIEWER, name="gone")) as client:
        assert client.get("/api/v1/me").json()["role"] == "viewer"
        assert served.dashboard.journal.remove_token("gone")
        assert client.get("/api/v1/me").status_code == 401
    served.dashboard.visitors.failures = FailureLimit()


def test_visitors_are_known_while_the_disk_still_stores_a_write(served: Served) -> None:
    """A busy disk may take half a minute; the tokens are read for each request."""
    with (
        served.client(served.token(Role.VIEWER)) as client,
        served.dashboard.journal._transaction() as run,
    ):
        run("DELETE FROM steps WHERE at < 0")
        assert client.get("/api/v1/me", timeout=10).json()["role"] == "viewer"


def test_the_one_time_url_logs_in_once(served: Served) -> None:
    with served.client() as client:
        first = client.get(served.first_url)
        assert first.status_code == 303
        cookie = first.headers["set-cookie"]
        assert "HttpOnly" in cookie and "SameSite=Strict" in cookie
        assert client.get("/api/v1/me").json()["role"] == "admin"
    with served.client() as other:
        assert other.get(served.first_url).status_code == 401


def entries(served: Served, *names: str) -> list[AuditEntry]:
    """Those of the audit that have one of these actions, newest first."""
    return [one for one in served.dashboard.journal.audit(limit=100) if one.action in names]


def test_a_named_token_in_an_address_logs_nobody_in(served: Served) -> None:
    token = served.token(Role.ADMIN)
    with served.client() as client:
        assert client.get("/session", params={"token": token}).status_code == 401
        sent = client.get("/session", params={"token": token}, headers={"accept": "text/html"})
        assert sent.headers["location"] == "/login?failed=token" and "set-cookie" not in sent.headers
        assert client.get("/api/v1/me", params={"token": token}).status_code == 401
    assert entries(served, "failed_login")[0].target.startswith("the one-time token is wrong")
    served.dashboard.visitors.failures = FailureLimit()


def test_behind_a_proxy_on_this_machine_no_one_time_token_makes_an_admin(tmp_path: Path) -> None:
    app = App("proxied", broker=f"sqlite:///{tmp_path / 'queue.db'}")
    with serving(app, tmp_path / "web.db", proxies=("127.0.0.1",)) as found:
        assert found.first_url == f"{found.url}/"
        with found.client(x_forwarded_for="203.0.113.9") as visitor:
            for token in ("", "umbel_"):
                assert visitor.get("/session", params={"token": token}).status_code == 401


def test_logins_failures_and_lock_outs_are_audited(served: Served) -> None:
    expired = served.token(Role.ADMIN, name="old", expires_at=time() - 1)
    with served.browser(Role.OPERATOR) as browser:
        assert browser.post("/session/end").status_code == 303
    with served.client(expired) as program:
        assert program.get("/api/v1/me").status_code == 401
    with served.client("umbel_wrong") as guesser:
        for _ in range(40):
            guesser.get("/api/v1/me")
    ended, begun = entries(served, "login", "logout")[:2]
    assert (ended.action, begun.action, ended.who) == ("logout", "login", begun.who)
    assert (begun.role, begun.address, begun.status) == ("operator", "127.0.0.1", "done")
    assert begun.arguments == {"by": "token"}
    locked, *failed = entries(served, "failed_login", "locked_out")[: credentials.FAILURES_MAX + 1]
    assert locked.action == "locked_out" and {one.action for one in failed} == {"failed_login"}
    assert [(one.who, one.target) for one in failed] == [
        *[("unknown", "wrong token")] * (credentials.FAILURES_MAX - 1),
        ("old", "the token has expired"),
    ]
    with served.browser(Role.VIEWER) as browser:  # the same address
        page = browser.get("/audit").text
        assert "<b>locked out</b>" in page and "<b>failed login</b>" in page and "umbel_wrong" not in page
    served.dashboard.visitors.failures = FailureLimit()


def test_refused_requests_are_audited_and_bounded(served: Served) -> None:
    with served.browser() as browser:
        name = browser.get("/api/v1/me").json()["name"]
        for _ in range(40):
            browser.post("/api/v1/actions", json=PURGE, headers={"origin": "https://evil.example"})
    found = entries(served, "refused_request")
    assert len(found) == credentials.FAILURES_MAX
    assert (found[0].who, found[0].target) == (name, "POST /api/v1/actions")
    assert "another site, https://evil.example" in found[0].arguments["why"]


def test_an_audit_that_cannot_be_written_lets_people_in_and_runs_no_query(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(_entry: object) -> int:
        raise sqlite3.OperationalError("database or disk is full")

    app = App("full", broker=f"sqlite:///{tmp_path / 'queue.db'}")
    with serving(app, tmp_path / "web.db") as found:
        monkeypatch.setattr(found.dashboard.journal, "note", full)
        with found.browser(Role.OPERATOR) as browser:
            assert browser.get("/api/v1/me").json()["role"] == "operator"
            refused = browser.post("/api/v1/history/sql", json={"sql": "select 1"})
            assert refused.status_code == 503 and "query refused" in refused.json()["detail"]
    assert "cannot write to the audit log" in {record.message for record in caplog.records}


def test_by_tls_browsers_are_to_come_back_by_tls(tmp_path: Path) -> None:
    app = App("tls", broker=f"sqlite:///{tmp_path / 'queue.db'}")
    with serving(app, tmp_path / "web.db", proxies=("127.0.0.1",)) as found:
        for headers, answer in (({"x_forwarded_proto": "https"}, "max-age=31536000"), ({}, None)):
            with found.client(**headers) as client:
                for path in ("/healthcheck", "/login", "/api/v1/me", "/nothing", "/static/umbel.css"):
                    assert client.get(path).headers.get("strict-transport-security") == answer, path
    with (
        serving(app, tmp_path / "web.db", public_url="https://dash.example") as found,
        found.client() as client,
    ):
        sent = client.post("/session", data={"token": found.token(Role.VIEWER)})
        assert sent.headers["strict-transport-security"] == "max-age=31536000"
        assert (
            sent.headers["set-cookie"].startswith("__Host-umbel_session")
            and "; Secure" in sent.headers["set-cookie"]
        )


def test_a_viewers_change_is_refused_and_audited(served: Served) -> None:
    with served.browser(Role.VIEWER) as viewer:
        refused = viewer.post("/api/v1/actions", json=PURGE)
        assert refused.status_code == 403 and "admin" in refused.json()["detail"]
        (newest, *_) = viewer.get("/api/v1/audit", params={"limit": 1}).json()
    assert (newest["action"], newest["status"], newest["role"]) == ("purge", "refused", "viewer")
    with served.browser(Role.OPERATOR) as operator:
        assert operator.post("/api/v1/actions", json=PURGE).status_code == 403


def test_the_login_form_is_taken_from_our_own_pages_only(served: Served) -> None:
    with served.browser(Role.VIEWER) as browser:
        form = {"token": served.token(Role.ADMIN)}
        assert (
            browser.post("/session", data=form, headers={"origin": "https://evil.example"}).status_code == 403
        )
        assert browser.post("/session", data=form, headers={"x-csrf-token": ""}).status_code == 303
        assert browser.get("/api/v1/me").json()["role"] == "admin"


def test_a_change_from_another_site_is_refused(served: Served) -> None:
    with served.browser() as browser:
        for origin in ("https://evil.example", "null", f"{served.url}.evil.example"):
            refused = browser.post("/api/v1/actions", json=PURGE, headers={"origin": origin})
            assert refused.status_code == 403, origin
        del browser.headers["origin"]
        assert browser.post("/api/v1/actions", json=PURGE).status_code == 403
    with served.client(served.token(Role.ADMIN), origin="https://evil.example") as program:
        assert program.post("/api/v1/actions", json=PURGE).status_code == 403


def test_a_change_without_the_csrf_token_is_refused(served: Served) -> None:
    with served.browser() as browser, served.browser() as other:
        assert browser.post("/api/v1/actions", json=PURGE).status_code == 200
        for wrong in ("", "x", other.headers["x-csrf-token"]):
            refused = browser.post("/api/v1/actions", json=PURGE, headers={"x-csrf-token": wrong})
            assert refused.status_code == 403, wrong


def test_a_page_says_how_to_log_out_and_of_how_many_sessions(served: Served) -> None:
    token = served.token(Role.VIEWER)
    with served.client() as first, served.client() as second:
        for client in (first, second):
            assert client.post("/session", data={"token": token}).status_code == 303
        assert "Log out of all 2 sessions" in first.get("/").text
        csrf = {"x-csrf-token": first.get("/api/v1/me").json()["csrf"], "origin": served.url}
        ended = first.post("/session/end?everywhere=yes", headers=csrf | {"hx-request": "true"})
        assert (ended.status_code, ended.headers["hx-redirect"]) == (204, "/login")
        assert [client.get("/api/v1/me").status_code for client in (first, second)] == [401, 401]
    with served.client(token) as program:
        assert "Log out" not in program.get("/").text


def test_an_admin_ends_the_sessions_of_a_name(served: Served) -> None:
    token = served.token(Role.VIEWER, name="bob")
    with served.client() as bob, served.browser() as admin, served.browser(Role.OPERATOR) as operator:
        assert bob.post("/session", data={"token": token}).status_code == 303
        action = {"action": "end_sessions", "name": "bob"}
        assert (
            "End sessions" in admin.get("/audit").text and "End sessions" not in operator.get("/audit").text
        )
        assert operator.post("/api/v1/actions", json=action).status_code == 403
        assert admin.post("/api/v1/actions", json=action | {"nodes": ["w"]}).status_code == 422
        assert bob.get("/api/v1/me").status_code == 200
        assert admin.post("/api/v1/actions", json=action).json()["count"] == 1
        assert bob.get("/api/v1/me").status_code == 401
        assert admin.get("/api/v1/me").status_code == 200
    assert entries(served, "end_sessions")[0].target == "bob"


def test_every_answer_says_what_it_is_and_is_not_stored(served: Served) -> None:
    kinds = {
        "/": "text/html; charset=utf-8",
        "/login": "text/html; charset=utf-8",
        "/healthcheck": "text/plain; charset=utf-8",
        "/metrics": "text/plain; version=1.0.0; charset=utf-8",
        "/api/v1/me": "application/json",
        "/api/v1/nothing": "application/problem+json",
        "/static/umbel.js": "text/javascript; charset=utf-8",
        "/static/umbel.css": "text/css; charset=utf-8",
        "/static/icon.svg": "image/svg+xml",
    }
    with served.client(served.token(Role.VIEWER)) as client:
        for path, kind in kinds.items():
            headers = client.get(path).headers
            assert headers["content-type"] == kind, path
            assert path.startswith("/static/") or headers["cache-control"] == "no-store", path
        assert client.post("/session/end").headers["clear-site-data"] == '"cache"'


def test_methods_that_nothing_uses_are_refused_and_echo_nothing(served: Served) -> None:
    with served.client(served.token(Role.ADMIN)) as client:
        for method in ("TRACE", "PUT", "DELETE", "PATCH", "CONNECT"):
            for path in ("/", "/api/v1/tasks", "/session", "/static/umbel.js"):
                answer = client.request(method, path, headers={"x-probe": "echoed"})
                assert answer.status_code in {400, 404, 405}, (method, path)
                assert "echoed" not in answer.text


def test_a_request_with_two_lengths_is_no_way_to_a_second_request(served: Served) -> None:
    """What a proxy takes for a body must not be taken for a request here, or the other way round."""
    host, port = served.url.removeprefix("http://").split(":")
    token = served.token(Role.ADMIN)
    hidden = b"GET /api/v1/me HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer " + token.encode() + b"\r\n\r\n"
    for lengths in (
        b"Content-Length: %d\r\nTransfer-Encoding: chunked\r\n" % len(hidden),
        b"Transfer-Encoding: chunked\r\nContent-Length: %d\r\n" % len(hidden),
        b"Content-Length: 0\r\nContent-Length: %d\r\n" % len(hidden),
        b"Transfer-Encoding: xchunked\r\n",
        b"Content-Length: +0\r\n",
    ):
        with socket.create_connection((host, int(port))) as raw:
            raw.settimeout(5)
            raw.sendall(b"POST /session HTTP/1.1\r\nHost: x\r\n" + lengths + b"\r\n" + hidden)
            answer = b""
            with suppress(TimeoutError):
                while part := raw.recv(65_536):
                    answer += part
        assert answer.startswith(b"HTTP/1.1 400"), (lengths, answer[:100])
        assert b"admin" not in answer


def test_logging_out_ends_the_session(served: Served) -> None:
    with served.browser() as browser:
        ((name, value),) = browser.cookies.items()
        kept = f"{name}={value}"
        assert browser.post("/session/end").status_code == 303
    with served.client(cookie=kept) as thief:
        assert thief.get("/api/v1/me").status_code == 401


def test_every_answer_forbids_scripts_of_others_framing_and_sharing(served: Served) -> None:
    with served.client(origin="https://evil.example") as client:
        for path in ("/healthcheck", "/api/v1/me", "/nothing", "/login"):
            headers = client.get(path).headers
            assert "default-src 'self'" in headers["content-security-policy"], path
            assert "frame-ancestors 'none'" in headers["content-security-policy"]
            assert headers["x-frame-options"] == "DENY" and headers["x-content-type-options"] == "nosniff"
            assert "access-control-allow-origin" not in headers


@pytest.mark.parametrize(
    "path", ["/static/../web.db", "/static/%2e%2e/%2e%2e/etc/passwd", "/static//etc/passwd", "/..%2fweb.db"]
)
def test_no_path_leads_out_of_the_static_files(served: Served, path: str) -> None:
    host, port = served.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as raw:  # httpx tidies paths
        raw.sendall(f"GET {path} HTTP/1.0\r\nHost: x\r\n\r\n".encode())
        status = raw.recv(100).split()[1]
    assert status in (b"401", b"404", b"303")


def test_too_much_is_refused(served: Served) -> None:
    with served.client(served.token(Role.ADMIN)) as client:
        too_large = client.post("/api/v1/actions", content=b"x" * 1_100_000)
        assert too_large.status_code == 413
        assert client.post("/api/v1/actions", content=b"action=purge").status_code == 415
        assert client.post("/api/v1/actions", json={"action": "purge"}).status_code == 400
        assert client.post("/api/v1/actions", json={"action": "burn"}).status_code == 400


def test_only_so_many_streams_are_open(served: Served) -> None:
    token = served.token(Role.VIEWER)
    with ExitStack() as stack:
        opened = [stack.enter_context(served.stream(token)) for _ in range(60)]
        found = [raw.recv(12).split()[1] for raw in opened]
    assert found.count(b"200") == CLIENTS_MAX and found.count(b"503") == 60 - CLIENTS_MAX
    wait_until(lambda: served.dashboard.hub.clients == 0, what="streams to be closed")


@pytest.fixture
def many_files() -> Iterator[None]:
    """Client and server are one process here."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 4096)), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("many_files")
def test_of_a_thousand_streams_some_are_refused_and_pages_go_on(tmp_path: Path) -> None:
    app = App("many", broker=f"sqlite:///{tmp_path / 'queue.db'}")
    with serving(app, tmp_path / "web.db") as found, ExitStack() as stack:
        visitors = [found.token(Role.VIEWER) for _ in range(20)]
        opened = [stack.enter_context(found.stream(token)) for token in visitors for _ in range(50)]
        answers = Counter(raw.recv(12).split()[1] for raw in opened)
        assert answers == {b"200": settings.CLIENTS_MAX, b"503": 1000 - settings.CLIENTS_MAX}
        with found.client(visitors[0]) as client:
            assert client.get("/").status_code == client.get("/api/v1/nodes").status_code == 200
        found.dashboard.cluster.model.changes.note("tasks", "told-to-all")
        told = sum(b"told-to-all" in _all_of(raw, b"told-to-all") for raw in opened)
        assert told == settings.CLIENTS_MAX


def _all_of(raw: socket.socket, wanted: bytes) -> bytes:
    """What comes until that is among it, or the connection ends."""
    found = b""
    while wanted not in found and (part := raw.recv(65_536)):
        found += part
        if b"problem+json" in found:
            break
    return found


def test_a_stream_ends_with_its_token_and_one_visitor_has_so_many(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "STREAMS_MAX", 2)
    monkeypatch.setattr(hub, "JUDGE_S", 0.05)
    token = served.token(Role.VIEWER, name="short")
    with ExitStack() as stack:
        opened = []
        for _ in range(3):
            opened.append(stack.enter_context(served.stream(token)))
            opened[-1].recv(9)
        assert [raw.recv(3) for raw in opened] == [b"200", b"200", b"429"]
        assert served.dashboard.journal.remove_token("short")
        for raw in opened[:2]:
            found = b""
            while not found.endswith(b"\r\n0\r\n\r\n"):  # the last chunk: it ended in good order
                found += (part := raw.recv(65_536))
                assert part, found[-100:]
    wait_until(lambda: served.dashboard.hub.clients == 0, what="streams to be closed")


def test_a_client_that_does_not_read_is_dropped(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "SLOW_S", 0.2)
    token, changes = served.token(Role.VIEWER), served.dashboard.cluster.model.changes
    before = served.dashboard.hub.dropped
    with served.stream(token, read_bytes=2048):

        def is_dropped() -> bool:
            for number in range(100):
                changes.note("tasks", f"{number}".rjust(4000, "x"))
            return served.dashboard.hub.dropped > before

        wait_until(is_dropped, what="the client to be dropped")
    wait_until(lambda: served.dashboard.hub.clients == 0, what="its place to be free")


def test_a_proxys_header_is_read_from_listed_addresses_only(tmp_path: Path) -> None:
    app = App("proxied", broker=f"sqlite:///{tmp_path / 'queue.db'}")
    for proxies, status in ((("127.0.0.1",), 200), (("10.0.0.0/8",), 401)):
        with (
            serving(app, tmp_path / "web.db", proxies=proxies, proxy_role=Role.OPERATOR) as found,
            found.client(x_forwarded_user="ann") as client,
        ):
            answer = client.get("/api/v1/me")
            assert answer.status_code == status
            if status == 200:
                assert (answer.json()["name"], answer.json()["role"]) == ("ann", "operator")
                change = client.post("/api/v1/actions", json={"action": "mark", "text": "v1"})
                assert (
                    change.status_code == 403
                )  # any site can have a proxy's cookie sent: CSRF holds here too


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.5", "::", "dashboard.example"])
def test_a_public_address_needs_a_way_to_log_in(host: str) -> None:
    with pytest.raises(ConfigurationError, match="token add"):
        check(WebSettings(host=host), named_tokens=0)
    with pytest.raises(ConfigurationError, match="loopback"):
        check(WebSettings(host=host, login=False), named_tokens=5)
    check(WebSettings(host=host), named_tokens=1)
    check(WebSettings(host=host, proxies=("10.0.0.1",)), named_tokens=0)
    with pytest.raises(ConfigurationError, match="neither an address nor a network"):
        check(WebSettings(host=host, proxies=("proxy.example",)), named_tokens=0)


def test_an_address_that_is_taken_is_one_error_with_the_remedy(served: Served, tmp_path: Path) -> None:
    taken = int(served.url.rpartition(":")[2])
    app = App("second", broker=f"sqlite:///{tmp_path / 'queue.db'}")
    server = Server(app, WebSettings(state_file=tmp_path / "web.db", port=taken), lambda _url: None)
    with pytest.raises(ConfigurationError, match="choose another --port"):
        server.run()


def test_without_login_only_the_machines_own_names_are_answered(tmp_path: Path) -> None:
    app = App("open", broker=f"sqlite:///{tmp_path / 'queue.db'}")
    with serving(app, tmp_path / "web.db", login=False) as found, found.client() as client:
        assert client.get("/api/v1/me").json()["role"] == "admin"
        rebound = client.get("/api/v1/me", headers={"host": "evil.example"})
        assert rebound.status_code == 403
