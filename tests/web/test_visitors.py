"""Who asks, judged without a server: sessions that end with their token, proxies, and odd headers."""

import asyncio
import sqlite3
from collections.abc import Callable
from pathlib import Path
from time import time
from typing import Any

import httpx
import msgspec
import pytest

from umbel.app.app import App
from umbel.errors import ConfigurationError
from umbel.web import asgi, credentials, hub
from umbel.web import visitors as visitors_module
from umbel.web.actions import AuditEntry
from umbel.web.credentials import Token, digest_of, make_token
from umbel.web.dashboard import Dashboard
from umbel.web.http import Forbidden, Refused, Visitor
from umbel.web.hub import STREAMS_MAX, EventStream
from umbel.web.settings import Oidc, Role, WebSettings, check
from umbel.web.visitors import Visitors

PROXIES = ("10.0.0.0/8",)


def token(given: str, *, lasts_s: float | None = None) -> Token:
    ends_at = None if lasts_s is None else time() + lasts_s
    return Token(name="ci", digest=digest_of(given), role=Role.OPERATOR, created_at=1.0, expires_at=ends_at)


def scope(*headers: tuple[str, str], client: str = "127.0.0.1", method: str = "GET") -> dict[str, Any]:
    named = [("host", "localhost:5555")] if "host" not in dict(headers) else []
    raw = [(name.encode(), value.encode("latin-1")) for name, value in [*named, *headers]]
    return {
        "type": "http",
        "method": method,
        "path": "/",
        "query_string": b"",
        "headers": raw,
        "client": (client, 1),
    }


def visitors_of(
    settings: WebSettings, tokens: Callable[[], list[Token]], noted: list[AuditEntry] | None = None
) -> Visitors:
    """`noted`: what is written to the audit."""

    async def note(entry: AuditEntry) -> None:
        if noted is not None:
            noted.append(entry)

    return Visitors(settings, tokens, note)


def judged(visitors: Visitors, *headers: tuple[str, str], **options: Any) -> Visitor | None:
    return asyncio.run(visitors.judge(scope(*headers, **options)))


def logged_in(visitors: Visitors, given: str, *headers: tuple[str, str], client: str = "127.0.0.1") -> str:
    """The cookie as it is set."""
    return asyncio.run(visitors.log_in(given, scope(*headers, client=client)))


def sent_back(cookie: str) -> tuple[str, str]:
    return ("cookie", cookie.partition(";")[0])


# -- sessions ------------------------------------------------------------------------------------


def test_a_session_ends_when_its_token_is_removed() -> None:
    given = make_token()
    tokens = [token(given)]
    visitors = visitors_of(WebSettings(), lambda: tokens)
    cookie = sent_back(logged_in(visitors, given))
    found = judged(visitors, cookie)
    assert found is not None and found.name == "ci"
    assert asyncio.run(visitors.still_knows(found, scope(cookie)))
    tokens.clear()
    assert not asyncio.run(visitors.still_knows(found, scope(cookie)))
    assert judged(visitors, cookie) is None
    tokens.append(token(given))
    assert judged(visitors, cookie) is None  # it does not come back


def test_a_session_lasts_no_longer_than_its_token() -> None:
    given = make_token()
    tokens = [token(given, lasts_s=100)]
    visitors = visitors_of(WebSettings(), lambda: tokens)
    cookie = logged_in(visitors, given)
    age = int(cookie.rpartition("Max-Age=")[2])
    assert 0 < age <= 100
    tokens[:] = [token(given, lasts_s=-1)]
    assert judged(visitors, sent_back(cookie)) is None


def test_a_bearer_that_was_removed_is_not_known_any_more_and_no_guess() -> None:
    given = make_token()
    tokens = [token(given)]
    visitors = visitors_of(WebSettings(), lambda: tokens)
    asked = scope(("authorization", f"Bearer {given}"))
    found = asyncio.run(visitors.judge(asked))
    assert found is not None and asyncio.run(visitors.still_knows(found, asked))
    tokens.clear()
    assert not asyncio.run(visitors.still_knows(found, asked))
    assert not visitors.failures._counts


def test_a_file_that_cannot_be_read_is_an_answer_of_its_own() -> None:
    def unreadable() -> list[Token]:
        raise sqlite3.OperationalError("disk I/O error")

    visitors = visitors_of(WebSettings(), unreadable)
    with pytest.raises(Refused) as refused:
        judged(visitors, ("authorization", f"Bearer {make_token()}"))
    assert refused.value.problem.status == 503 and "disk" not in refused.value.problem.detail
    with pytest.raises(Refused, match="cannot read its state file"):
        logged_in(visitors, make_token())


def test_tokens_are_not_read_on_the_event_loop() -> None:
    given = make_token()

    def read() -> list[Token]:
        with pytest.raises(RuntimeError):
            asyncio.get_running_loop()
        return [token(given)]

    visitors = visitors_of(WebSettings(), read)
    assert judged(visitors, sent_back(logged_in(visitors, given))) is not None
    assert judged(visitors, ("authorization", f"Bearer {given}")) is not None


def test_guesses_at_the_same_time_are_counted_too() -> None:
    visitors = visitors_of(WebSettings(), list)

    async def guess() -> int:
        try:
            await visitors.log_in("umbel_wrong", scope())
        except Refused as refused:
            return refused.problem.status
        return 200

    async def all_at_once() -> list[int]:
        return await asyncio.gather(*(guess() for _ in range(3 * credentials.FAILURES_MAX)))

    assert asyncio.run(all_at_once()).count(401) == credentials.FAILURES_MAX


def test_dashboards_of_one_host_have_cookies_of_their_own() -> None:
    given = make_token()
    visitors = visitors_of(WebSettings(), lambda: [token(given)])
    names = [
        logged_in(visitors, given, ("host", host)).partition("=")[0]
        for host in ("localhost:5555", "localhost:5556", "dash.example", "[::1]", "[::1]:80", "x:²")
    ]
    plain = "umbel_session"
    assert names == [f"{plain}_5555", f"{plain}_5556", plain, plain, f"{plain}_80", plain]
    below = {**scope(), "root_path": "/ops/umbel"}
    cookie = asyncio.run(visitors.log_in(given, below))
    assert cookie.startswith(f"{plain}_5555_ops-umbel=") and "; Path=/ops/umbel;" in cookie
    assert "; Secure" not in cookie


@pytest.mark.parametrize(
    ("settings", "headers", "client"),
    [
        (WebSettings(public_url="https://dash.example"), [], "9.9.9.9"),
        (WebSettings(proxies=PROXIES), [("x-forwarded-proto", "https")], "10.0.0.5"),
    ],
)
def test_by_tls_no_other_host_or_plain_page_can_set_the_cookie(
    settings: WebSettings, headers: list[tuple[str, str]], client: str
) -> None:
    given = make_token()
    visitors = visitors_of(settings, lambda: [token(given)])
    below = {**scope(*headers, client=client), "root_path": "/ops"}
    cookie = asyncio.run(visitors.log_in(given, below))
    assert cookie.startswith("__Host-umbel_session_5555_ops=")
    assert "; Path=/;" in cookie and cookie.endswith("; Secure") and "Domain" not in cookie
    name, value = sent_back(cookie)
    asked = {**scope((name, value), *headers, client=client), "root_path": "/ops"}
    assert asyncio.run(visitors.judge(asked)) is not None
    planted = value.removeprefix("__Host-")
    asked = {**scope((name, planted), *headers, client=client), "root_path": "/ops"}
    assert asyncio.run(visitors.judge(asked)) is None


# -- the one-time token --------------------------------------------------------------------------


def test_only_a_dashboard_of_this_machine_alone_has_a_one_time_token() -> None:
    oidc = Oidc(issuer="https://login.example", client_id="umbel", roles={"*": Role.VIEWER})
    assert visitors_of(WebSettings(), list).one_time
    for settings in (
        WebSettings(proxies=("127.0.0.1",)),  # what the proxy forwards comes from this machine too
        WebSettings(host="0.0.0.0"),
        WebSettings(oidc=oidc, public_url="https://dash.example"),
        WebSettings(authenticate=lambda _scope: None),
        WebSettings(login=False),
    ):
        assert visitors_of(settings, list).one_time == "", settings


def test_the_one_time_token_is_worth_nothing_after_some_hours(monkeypatch: pytest.MonkeyPatch) -> None:
    visitors, now = visitors_of(WebSettings(), list), time()
    monkeypatch.setattr(visitors_module, "time", lambda: now + visitors_module.ONE_TIME_S + 1)
    with pytest.raises(Refused, match="wrong, was used before, or has expired"):
        asyncio.run(visitors.log_in_once(visitors.one_time, scope()))


def test_the_one_time_token_is_for_this_machine_alone() -> None:
    visitors = visitors_of(WebSettings(), list)
    for header in ("x-forwarded-for", "via", "forwarded"):
        with pytest.raises(Refused):
            asyncio.run(visitors.log_in_once(visitors.one_time, scope((header, "1"))))
    assert asyncio.run(visitors.log_in_once(visitors.one_time, scope()))


def test_a_named_token_in_an_address_is_refused_and_never_spends_the_one_time_token() -> None:
    given, noted = make_token(), list[AuditEntry]()
    visitors = visitors_of(WebSettings(), lambda: [token(given)], noted)
    with pytest.raises(Refused) as refused:
        asyncio.run(visitors.log_in_once(given, scope()))
    assert refused.value.problem.status == 401 and len(visitors.sessions) == 0
    assert asyncio.run(visitors.log_in_once(visitors.one_time, scope()))
    assert [one.action for one in noted] == ["failed_login", "login"]


# -- without a login -----------------------------------------------------------------------------


def test_without_login_only_this_machine_is_answered() -> None:
    visitors = visitors_of(WebSettings(login=False), list)
    found = judged(visitors)
    assert found is not None and found.role is Role.ADMIN
    with pytest.raises(Forbidden):
        judged(visitors, client="192.168.1.7")
    for host in ("[", "evil.example", "127.0.0.1.evil.example", ""):
        with pytest.raises(Forbidden):
            judged(visitors, ("host", host))


@pytest.mark.parametrize(
    "header",
    [
        *("forwarded", "via", "x-real-ip", "x-forwarded-for", "x-forwarded-proto", "x-forwarded-host"),
        *("x-forwarded-user", "x-forwarded-prefix", "x-auth-request-user", "remote-user", "x-remote-user"),
        *("x-client-ip", "x-cluster-client-ip", "true-client-ip", "cf-connecting-ip", "cf-ray", "cdn-loop"),
        *("x-envoy-external-address", "x-amzn-trace-id", "x-original-uri", "x-original-forwarded-for"),
        *("fastly-client-ip", "x-goog-iap-jwt-assertion", "x-azure-clientip", "x-appengine-user-ip"),
        *("x-proxyuser-ip", "x-arr-log-id", "x-varnish", "x-vercel-id", "x-webauth-user", "x-request-start"),
        *("x-our-user", "x-scheme"),
    ],
)
def test_without_login_nothing_that_a_proxy_forwards_is_answered(header: str) -> None:
    visitors = visitors_of(WebSettings(login=False, proxy_header="X-Our-User"), list)
    with pytest.raises(Forbidden, match=f"this request has header {header}; log in by tokens"):
        judged(visitors, (header, "1"))


def test_without_login_no_proxy_of_http_1_0_is_answered() -> None:
    visitors = visitors_of(WebSettings(login=False), list)
    with pytest.raises(Forbidden, match=r"HTTP/1\.0"):
        asyncio.run(visitors.judge({**scope(), "http_version": "1.0"}))
    assert asyncio.run(visitors.judge({**scope(), "http_version": "1.1"})) is not None


def test_without_login_an_application_decides_alone() -> None:
    visitors = visitors_of(WebSettings(login=False, authenticate=lambda _scope: None), list)
    assert judged(visitors, ("host", "shop.example"), client="192.168.1.7") is None
    assert judged(visitors) is None


def test_a_mounted_dashboard_without_login_needs_to_be_told_who_asks(tmp_path: Path) -> None:
    app = App("mounted", broker=f"sqlite:///{tmp_path / 'queue.db'}")
    with pytest.raises(ConfigurationError, match="authenticate="):
        asgi(app, state_file=tmp_path / "web.db", login=False)
    asgi(app, state_file=tmp_path / "web.db", login=False, authenticate=lambda _scope: None)


def test_no_login_and_a_proxy_exclude_each_other() -> None:
    with pytest.raises(ConfigurationError, match="use only one"):
        check(WebSettings(login=False, proxies=PROXIES), named_tokens=1)


# -- behind a proxy ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("client", "told", "address"),
    [
        ("10.0.0.5", ["7.7.7.7, 1.2.3.4, 10.0.0.9"], "1.2.3.4"),
        ("10.0.0.5", ["7.7.7.7", "1.2.3.4:567"], "1.2.3.4"),
        ("10.0.0.5", ["[2001:db8::1]:567"], "2001:db8::1"),
        ("10.0.0.5", ["1.2.3.4, somebody"], "10.0.0.5"),
        ("10.0.0.5", ["10.0.0.9"], "10.0.0.5"),
        ("10.0.0.5", [], "10.0.0.5"),
        ("9.9.9.9", ["1.2.3.4"], "9.9.9.9"),
    ],
)
def test_the_address_is_the_last_one_that_no_proxy_of_ours_has(
    client: str, told: list[str], address: str
) -> None:
    visitors = visitors_of(WebSettings(proxies=PROXIES), list)
    assert visitors.address_of(scope(*(("x-forwarded-for", one) for one in told), client=client)) == address


def test_a_lock_out_refuses_wrong_tokens_of_that_address_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(visitors_module, "TOGETHER_S", 0.0)
    given, fresh, noted = make_token(), make_token(), list[AuditEntry]()
    tokens = [token(given)]
    visitors = visitors_of(WebSettings(proxies=PROXIES), lambda: tokens, noted)
    guesser, other = ("x-forwarded-for", "1.2.3.4"), ("x-forwarded-for", "1.2.3.5")
    for _ in range(credentials.FAILURES_MAX):
        with pytest.raises(Refused, match="wrong"):
            logged_in(visitors, "umbel_wrong", guesser, client="10.0.0.5")
    for _ in range(3):
        with pytest.raises(Refused, match="wait"):
            logged_in(visitors, "umbel_wrong", guesser, client="10.0.0.5")
    assert logged_in(visitors, given, guesser, client="10.0.0.5")
    assert judged(visitors, ("authorization", f"Bearer {given}"), guesser, client="10.0.0.5") is not None
    with pytest.raises(Refused, match="wrong"):
        logged_in(visitors, "umbel_wrong", other, client="10.0.0.5")
    tokens[:] = [token(fresh)]
    assert logged_in(visitors, fresh, guesser, client="10.0.0.5")
    with pytest.raises(Refused, match="wait"):
        logged_in(visitors, given, guesser, client="10.0.0.5")
    of_guesser = [one.action for one in noted if one.address == "1.2.3.4" and one.status == "refused"]
    assert of_guesser == ["failed_login"] * credentials.FAILURES_MAX + ["locked_out"]


def test_guesses_of_a_locked_out_address_share_one_read_of_the_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(visitors_module, "TOGETHER_S", 0.01)
    given, reads = make_token(), list[int]()

    def read() -> list[Token]:
        reads.append(1)
        return [token(given)]

    async def scenario() -> None:
        visitors = visitors_of(WebSettings(), read)
        for _ in range(credentials.FAILURES_MAX):
            visitors.failures.note("127.0.0.1", time())
        guesses = [visitors.log_in("umbel_wrong", scope()) for _ in range(1000)]
        answers = await asyncio.gather(*guesses, visitors.log_in(given, scope()), return_exceptions=True)
        assert all(isinstance(one, Refused) for one in answers[:-1]) and isinstance(answers[-1], str)

    asyncio.run(scenario())
    assert len(reads) == 1


def test_an_address_of_ipv6_is_as_good_as_its_network() -> None:
    found = credentials.FailureLimit()
    for number in range(credentials.FAILURES_MAX):
        found.note(f"2001:db8:0:1::{number:x}", 1.0)
    assert found.is_locked_out("2001:db8:0:1:ffff::1", 2.0)
    assert not found.is_locked_out("2001:db8:0:2::1", 2.0)
    assert not found.is_locked_out("2001:db8:0:1::1", 1.0 + credentials.PERIOD_S)
    assert found.note("::ffff:1.2.3.4", 1.0) is credentials.Verdict.COUNTED


def test_failures_that_are_written_down_are_bounded_for_all_addresses_together() -> None:
    found = credentials.FailureLimit()
    verdicts = [found.note(f"10.1.{number // 250}.{number % 250}", 1.0) for number in range(3000)]
    assert verdicts.count(credentials.Verdict.COUNTED) == credentials.ALL_FAILURES_MAX
    assert found.note("10.9.9.9", 1.0 + credentials.PERIOD_S) is credentials.Verdict.COUNTED


def test_the_cookie_is_secure_where_a_trusted_proxy_was_asked_by_https() -> None:
    given, https = make_token(), ("x-forwarded-proto", "https")
    visitors = visitors_of(WebSettings(proxies=PROXIES), lambda: [token(given)])
    assert "; Secure" in logged_in(visitors, given, https, client="10.0.0.5")
    assert "; Secure" not in logged_in(visitors, given, https, client="9.9.9.9")
    assert "; Secure" not in logged_in(visitors, given, client="10.0.0.5")


def test_beside_a_provider_a_proxy_names_nobody_unless_its_header_was_given() -> None:
    """A proxy that only forwards passes on what the visitor wrote in the header."""
    oidc = Oidc(issuer="https://login.example", client_id="umbel", roles={"*": Role.VIEWER})
    settings = WebSettings(proxies=PROXIES, oidc=oidc, public_url="https://dash.example")
    named = ("x-forwarded-user", "root")
    assert judged(visitors_of(settings, list), named, client="10.0.0.5") is None
    settings = msgspec.structs.replace(settings, proxy_header="X-Forwarded-User")
    found = judged(visitors_of(settings, list), named, client="10.0.0.5")
    assert found is not None and found.name == "root"


def test_a_user_named_twice_is_refused() -> None:
    visitors = visitors_of(WebSettings(proxies=PROXIES), list)
    found = judged(visitors, ("x-forwarded-user", "ann"), client="10.0.0.5")
    assert found is not None and found.name == "ann"
    with pytest.raises(Refused, match="the request has 2 headers"):
        judged(visitors, ("x-forwarded-user", "root"), ("x-forwarded-user", "ann"), client="10.0.0.5")


def test_bearer_tokens_of_the_application_are_left_to_it() -> None:
    theirs, ours = ("authorization", "Bearer eyJhbGciOi"), ("authorization", "Bearer umbel_wrong")
    mounted = visitors_of(WebSettings(authenticate=lambda _scope: ("ann", "viewer")), list)
    found = judged(mounted, theirs)
    assert found is not None and (found.name, found.role) == ("ann", Role.VIEWER)
    assert not mounted.failures._counts
    proxied = visitors_of(WebSettings(proxies=PROXIES), list)
    found = judged(proxied, theirs, ("x-forwarded-user", "ann"), client="10.0.0.5")
    assert found is not None and found.name == "ann"
    for visitors, header in ((mounted, ours), (proxied, ours), (visitors_of(WebSettings(), list), theirs)):
        with pytest.raises(Refused, match="the token is wrong"):
            judged(visitors, header)


# -- as it is answered ---------------------------------------------------------------------------


def test_the_login_form_says_what_went_wrong_and_odd_headers_are_no_faults(tmp_path: Path) -> None:
    app = App("asked", broker=f"sqlite:///{tmp_path / 'queue.db'}")
    inner = asgi(app, state_file=tmp_path / "web.db")
    browser, wrong = {"accept": "text/html,*/*"}, {"token": "umbel_wrong"}

    async def ask() -> None:
        transport = httpx.ASGITransport(app=inner)
        async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
            sent = await client.post("/session", data=wrong, headers=browser)
            assert (sent.status_code, sent.headers["location"]) == (303, "/login?failed=token")
            used = await client.get("/session?token=umbel_used", headers=browser)
            assert (used.status_code, used.headers["location"]) == (303, "/login?failed=token")
            page = (await client.get("/login?failed=token", headers=browser)).text
            assert "not valid" in page and '<input type="password" name="token"' in page
            program = await client.post("/session", data=wrong)
            assert program.status_code == 401 and program.json()["title"] == "Unauthorized"
            for origin in ("http://[", "http://]:", "//"):
                odd = await client.post("/session", data=wrong, headers={"origin": origin})
                assert odd.status_code == 403, origin
            odd = await client.get("/session?token=x", headers={"host": "["})
            assert odd.status_code == 401
            long = await client.get("/healthcheck", headers={"content-length": "9" * 5000})
            assert long.status_code == 413

    asyncio.run(ask())


# -- streams -------------------------------------------------------------------------------------


async def silent() -> dict[str, Any]:
    await asyncio.Event().wait()
    return {}


def test_a_stream_ends_when_its_visitor_is_not_known_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "JUDGE_S", 0.0)
    app = App("pushing", broker=f"sqlite:///{tmp_path / 'queue.db'}")
    answers, sent = [True, True, False], list[Any]()

    async def still_known() -> bool:
        return answers.pop(0)

    async def keep(message: Any) -> None:
        sent.append(message)

    async def scenario() -> None:
        found = Dashboard(app, WebSettings(state_file=tmp_path / "web.db")).hub
        stream = EventStream(found, None, (), visitor="ann", still_known=still_known)
        async with asyncio.timeout(30):
            await stream({"type": "http"}, silent, keep)
        assert not answers and found.clients == 0
        assert sent[0]["status"] == 200 and not sent[-1].get("more_body")
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(scenario())


def test_a_cancelled_stream_leaves_nothing_behind_and_one_visitor_has_so_many(tmp_path: Path) -> None:
    app = App("pushing", broker=f"sqlite:///{tmp_path / 'queue.db'}")

    async def scenario() -> None:
        found = Dashboard(app, WebSettings(state_file=tmp_path / "web.db")).hub
        opened = asyncio.Event()

        async def still_known() -> bool:
            return True

        async def keep(_message: Any) -> None:
            if found.has_many_of("ann"):
                opened.set()

        def stream() -> EventStream:
            return EventStream(found, None, (), visitor="ann", still_known=still_known)

        running = [
            asyncio.ensure_future(stream()({"type": "http"}, silent, keep)) for _ in range(STREAMS_MAX)
        ]
        async with asyncio.timeout(30):
            await opened.wait()
            assert found.clients == STREAMS_MAX and not found.has_many_of("bob")
            for one in running:
                one.cancel()
            await asyncio.gather(*running, return_exceptions=True)
        assert all(one.cancelled() for one in running)
        assert found.clients == 0 and not found.has_many_of("ann")
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(scenario())
