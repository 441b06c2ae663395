"""Logging in by OpenID Connect, at a provider that Authlib serves: what works, and what must not."""

import asyncio
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from time import time
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest
from joserfc.jwk import RSAKey

from tests.web.oidc_provider import (
    CLIENT,
    SECRET,
    OidcProvider,
    providing,
    rsa_key,
    with_shared_secret,
)
from tests.web.serving import Served, serving
from umbel.app.app import App
from umbel.cli.run.web_options import provider_of
from umbel.errors import ConfigurationError
from umbel.web import credentials, oidc
from umbel.web import settings as settings_module
from umbel.web.settings import Oidc, Role, WebSettings, check

PAGE = {"accept": "text/html"}
ROLES = {"ops": Role.OPERATOR, "root": Role.ADMIN}


@pytest.fixture
def provider(monkeypatch: pytest.MonkeyPatch) -> Iterator[OidcProvider]:
    monkeypatch.setenv("AUTHLIB_INSECURE_TRANSPORT", "1")
    with providing() as found:
        yield found


@pytest.fixture
def served(provider: OidcProvider, tmp_path: Path) -> Iterator[Served]:
    with dashboard_of(provider, tmp_path) as found:
        yield found


def dashboard_of(provider: OidcProvider, home: Path, **options: Any) -> Any:
    given = {"client_id": CLIENT, "client_secret": SECRET, "roles": ROLES} | options
    app = App("asked", broker=f"sqlite:///{home / 'queue.db'}")
    of_provider = Oidc(issuer=provider.url, **given)
    provider.redirect_uri = f"http://127.0.0.1{oidc.CALLBACK}"  # the tests know the port
    return serving(app, home / "web.db", oidc=of_provider, public_url="http://127.0.0.1")


def log_in(client: httpx.Client) -> httpx.Response:
    """As a browser does it: to the provider, and back with what it gave."""
    begun = client.get("/login/oidc", headers=PAGE)
    assert begun.status_code == 303, begun.text
    if begun.headers["location"].startswith("/login?"):
        return begun
    back = httpx.get(begun.headers["location"], timeout=30, verify=False)
    assert back.status_code in {302, 303}, back.text
    parts = urlsplit(back.headers["location"])
    return client.get(f"{parts.path}?{parts.query}", headers=PAGE)


def why(served: Served) -> str:
    """What the audit says of the newest failure."""
    return next(
        entry.target for entry in served.dashboard.journal.audit(limit=10) if entry.action == "failed_login"
    )


# -- what works ------------------------------------------------------------------------------------


def test_a_person_logs_in_at_the_provider_and_is_audited(served: Served, provider: OidcProvider) -> None:
    with served.client() as client:
        assert f"Log in at {urlsplit(provider.url).netloc}" in client.get("/login", headers=PAGE).text
        entered = log_in(client)
        assert entered.status_code == 200 and '<meta http-equiv="refresh" content="0; url=/">' in entered.text
        me = client.get("/api/v1/me").json()
        assert (me["name"], me["role"]) == ("ann", "operator")
        assert not re.search("eyJ|code=|access_token|id_token", entered.text + str(entered.headers))
        cookies = entered.headers.get_list("set-cookie")
        assert any(
            "umbel_session" in cookie and "SameSite=Strict; Max-Age=43" in cookie for cookie in cookies
        )
        assert any("umbel_login" in cookie and "Max-Age=0" in cookie for cookie in cookies)
    (entry,) = served.dashboard.journal.audit(limit=10)
    assert (entry.action, entry.who, entry.role, entry.status) == ("login", "ann", "operator", "done")
    assert entry.arguments == {"by": "provider", "issuer": provider.url, "subject": "1"}


def test_the_request_says_what_the_protocol_wants(served: Served, provider: OidcProvider) -> None:
    with served.client() as client:
        begun = client.get("/login/oidc")
        asked = parse_qs(urlsplit(begun.headers["location"]).query)
        again = parse_qs(urlsplit(client.get("/login/oidc").headers["location"]).query)
    assert asked["response_type"] == ["code"] and asked["code_challenge_method"] == ["S256"]
    assert asked["scope"] == ["openid profile email"] and asked["client_id"] == [CLIENT]
    assert asked["redirect_uri"] == [provider.redirect_uri]
    for name in ("state", "nonce", "code_challenge"):
        assert len(asked[name][0]) == 43 and asked[name] != again[name]
    cookie = begun.headers["set-cookie"]
    assert "HttpOnly" in cookie and "SameSite=Lax" in cookie and "Max-Age=600" in cookie
    assert not {value for values in asked.values() for value in values} & set(re.split(r"[=;.]", cookie))


def test_the_secret_may_be_sent_in_the_form_and_public_clients_have_none(
    provider: OidcProvider, tmp_path: Path
) -> None:
    for method, secret in (("client_secret_post", SECRET), ("none", "")):
        provider.auth_method = method
        home = tmp_path / method
        home.mkdir()
        with dashboard_of(provider, home, client_secret=secret) as found, found.client() as client:
            entered = log_in(client)
            assert (entered.status_code == 200) is (method != "none")  # Authlib's grant wants a secret
            assert method != "none" or "invalid_client" in why(found)


@pytest.mark.parametrize(
    ("person", "info", "claim", "roles", "role"),
    [
        ({"groups": ["ops", "root", "x"]}, {}, "groups", ROLES, "admin"),
        ({"groups": "ops"}, {}, "groups", ROLES, "operator"),
        ({"realm_access": {"roles": ["root"]}}, {}, "realm_access.roles", ROLES, "admin"),
        ({"https://x.example/roles": ["root"]}, {}, "https://x.example/roles", ROLES, "admin"),
        ({}, {"sub": "1", "groups": ["root"]}, "groups", ROLES | {"*": Role.VIEWER}, "admin"),
        ({}, {"sub": "1"}, "groups", {"*": Role.VIEWER}, "viewer"),
        ({"email": "a@x", "email_verified": True}, {}, "email", {"a@x": Role.ADMIN}, "admin"),
        ({"email": "a@x"}, {"sub": "1"}, "email", {"a@x": Role.ADMIN}, ""),
        ({"groups": ["other"]}, {}, "groups", ROLES, ""),
        ({"groups": [["ops"], 7, None, {"ops": 1}]}, {"sub": "1"}, "groups", ROLES, ""),
        ({"groups": ["OPS", "ops "]}, {}, "groups", ROLES, ""),
        ({"realm_access": ["root"]}, {"sub": "1"}, "realm_access.roles", ROLES, ""),
    ],
)
def test_a_role_comes_from_a_claim(
    provider: OidcProvider, tmp_path: Path, person: Any, info: Any, claim: str, roles: Any, role: str
) -> None:
    provider.person, provider.info = {"sub": "1", "preferred_username": "ann", **person}, info
    with dashboard_of(provider, tmp_path, claim=claim, roles=roles) as found, found.client() as client:
        entered = log_in(client)
        if role:
            assert client.get("/api/v1/me").json()["role"] == role
        else:
            assert entered.headers["location"] == "/login?failed=role"
            assert client.get("/api/v1/me").status_code == 401
            (entry,) = found.dashboard.journal.audit(limit=1)
            assert (entry.who, entry.status) == ("ann", "refused") and repr(claim) in entry.target
            assert "None of your groups" in client.get("/login?failed=role", headers=PAGE).text


def test_a_new_key_of_the_provider_is_looked_for(
    served: Served, provider: OidcProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(oidc, "KEYS_AGAIN_S", 0.0)
    with served.client() as client:
        assert log_in(client).status_code == 200
        provider.key = rsa_key("second", "sig")
        assert log_in(client).status_code == 200
    assert (
        provider.asked.count("/jwks") == 2 and provider.asked.count("/.well-known/openid-configuration") == 1
    )


# -- what must not work ----------------------------------------------------------------------------


Break = Callable[[OidcProvider], None]


def claims(**changed: Any) -> Break:
    def apply(provider: OidcProvider) -> None:
        provider.broken = lambda known: {
            name: value for name, value in (known | changed).items() if value is not None
        }

    return apply


def shown(**changed: Any) -> Break:
    def apply(provider: OidcProvider) -> None:
        provider.shown = lambda known: known | changed

    return apply


def signed(make: Callable[[OidcProvider], Callable[[Any], str]]) -> Break:
    def apply(provider: OidcProvider) -> None:
        provider.sign = make(provider)

    return apply


def unsigned(_provider: OidcProvider) -> Callable[[Any], str]:
    import jwt

    return lambda known: jwt.encode(known, "", algorithm="none")


def by_another_key(provider: OidcProvider) -> Callable[[Any], str]:
    from joserfc import jwt

    other = RSAKey.generate_key(2048)
    header = {"alg": "RS256", "kid": provider.key.kid}
    return lambda known: str(jwt.encode(header, known, other, ["RS256"]))


def with_its_key_in_the_header(provider: OidcProvider) -> Callable[[Any], str]:
    from joserfc import jwt

    other = RSAKey.generate_key(2048, {"kid": "mine"})
    header = {
        "alg": "RS256",
        "kid": "mine",
        "jwk": other.as_dict(private=False),
        "jku": "http://127.0.0.1:1/",
    }
    return lambda known: str(jwt.encode(header, known, other, ["RS256"]))


@pytest.mark.parametrize(
    ("broken", "reason", "detail"),
    [
        (claims(nonce="another"), "token", "belongs to another login"),
        (claims(nonce=None), "token", "belongs to another login"),
        (claims(aud="other"), "token", "Audience"),
        (claims(aud=["other"], azp=CLIENT), "token", "Audience"),
        (claims(aud=["other", CLIENT]), "token", "issued to another client"),
        (claims(aud=["other", CLIENT], azp="other"), "token", "issued to another client"),
        (claims(azp="other"), "token", "issued to another client"),
        (claims(iss="https://evil.example"), "token", "issuer"),
        (claims(exp=1), "token", "expired"),
        (claims(exp=None), "token", '"exp"'),
        (claims(iat=None), "token", '"iat"'),
        (claims(sub=None), "token", '"sub"'),
        (claims(sub=7), "token", "Subject"),
        (claims(iat=10**11), "token", "not yet valid"),
        (signed(unsigned), "token", "signed with 'none'"),
        (signed(with_shared_secret), "token", "signed with 'HS256'"),
        (signed(by_another_key), "token", "Signature verification failed"),
        (signed(with_its_key_in_the_header), "token", "no key 'mine'"),
        (signed(lambda _: lambda _known: "not a token"), "token", "not valid"),
        (shown(issuer="https://evil.example"), "provider", "issuer is 'https://evil.example'"),
        (shown(token_endpoint="http://evil.example/token"), "provider", "does not use TLS"),
        (shown(token_endpoint="file:/etc/passwd"), "provider", "does not use TLS"),
        (shown(jwks_uri="http://[::1"), "provider", "does not use TLS"),
        (shown(authorization_endpoint=7), "provider", "Expected `str`"),
        (shown(id_token_signing_alg_values_supported=["HS256", "none"]), "token", r"not with \[\]"),
        (shown(authorization_response_iss_parameter_supported=True), "provider", "another issuer, ''"),
    ],
)
def test_what_is_not_genuine_or_for_another_login_lets_nobody_in(
    served: Served, provider: OidcProvider, broken: Break, reason: str, detail: str
) -> None:
    broken(provider)
    with served.client() as client:
        assert log_in(client).headers["location"] == f"/login?failed={reason}"
        assert client.get("/api/v1/me").status_code == 401
    assert re.search(detail, why(served)), why(served)


def test_user_info_about_somebody_else_gives_no_role(served: Served, provider: OidcProvider) -> None:
    provider.person, provider.info = {"sub": "1"}, {"sub": "2", "groups": ["root"]}
    with served.client() as client:
        assert log_in(client).headers["location"] == "/login?failed=token"
    assert "another subject" in why(served)


def test_an_answer_belongs_to_the_browser_and_the_login_that_began_it(
    served: Served, provider: OidcProvider
) -> None:
    with served.client() as mine, served.client() as theirs:
        begun = mine.get("/login/oidc")
        back = urlsplit(httpx.get(begun.headers["location"], timeout=30, verify=False).headers["location"])
        answer = f"{back.path}?{back.query}"
        assert theirs.get(answer).headers["location"] == "/login?failed=late"  # without the cookie
        theirs.get("/login/oidc")
        assert theirs.get(answer).headers["location"] == "/login?failed=late"  # with another one
        mine.get("/login/oidc")  # begun again: the cookie is that of the second login
        assert mine.get(answer).headers["location"] == "/login?failed=late"
        assert len(provider.codes) == 1  # the code was not exchanged
        assert provider.asked.count("/token") == 0


def test_another_site_cannot_begin_a_login(served: Served, provider: OidcProvider) -> None:
    with served.client() as client:
        for site, location in (("cross-site", "/login"), ("same-site", "/login"), ("none", provider.url)):
            begun = client.get("/login/oidc", headers={"sec-fetch-site": site})
            assert begun.headers["location"].startswith(location)
            assert ("set-cookie" in begun.headers) is (site == "none")


def test_a_code_is_good_for_one_login(served: Served) -> None:
    with served.client() as client:
        begun = client.get("/login/oidc")
        cookie = list(client.cookies.items())
        back = urlsplit(httpx.get(begun.headers["location"], timeout=30, verify=False).headers["location"])
        assert client.get(f"{back.path}?{back.query}").status_code == 200
        client.cookies.clear()
        for name, value in cookie:
            client.cookies.set(name, value)
        assert client.get(f"{back.path}?{back.query}").headers["location"] == "/login?failed=provider"
    assert "status 400" in why(served) and "invalid_grant" in why(served)


def test_a_login_ends_after_ten_minutes_and_a_cookie_cannot_be_made_up(
    provider: OidcProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_provider = Oidc(issuer=provider.url, client_id=CLIENT, client_secret=SECRET, roles=ROLES)
    made, now = oidc.Provider(of_provider, "http://127.0.0.1"), time()

    async def scenario() -> None:
        url, cookie = await made.begin()
        state = parse_qs(urlsplit(url).query)["state"][0]
        for wrong in ("", ".", "1.2.3", f"9{cookie}", cookie[:-1], cookie + "x", "é.ü", "\udcff"):
            with pytest.raises(oidc.LoginFailed, match="no login was started"):
                await made.finish({"state": state, "code": "x"}, wrong)
        monkeypatch.setattr(oidc, "time", lambda: now + oidc.LOGIN_MAX_S + 10)
        with pytest.raises(oidc.LoginFailed, match="no login was started"):
            await made.finish({"state": state, "code": "x"}, cookie)

    asyncio.run(scenario())
    made.close()


def test_a_refusal_of_the_provider_is_said(served: Served, provider: OidcProvider) -> None:
    provider.person = None
    with served.client() as client:
        assert log_in(client).headers["location"] == "/login?failed=denied"
        assert "refused the login" in client.get("/login?failed=denied", headers=PAGE).text
    assert "access_denied" in why(served)


def test_a_provider_that_is_away_leaves_tokens_working(tmp_path: Path, provider: OidcProvider) -> None:
    provider.stop()
    with dashboard_of(provider, tmp_path) as found, found.client() as client:
        for _ in range(5):
            assert client.get("/login/oidc").headers["location"] == "/login?failed=provider"
        with found.browser(Role.VIEWER) as browser:
            assert browser.get("/api/v1/me").json()["role"] == "viewer"
        assert "refused" in why(found)


def test_redirects_of_the_provider_are_not_followed(served: Served, provider: OidcProvider) -> None:
    shown(jwks_uri=f"{provider.url}/moved")(provider)
    with served.client() as client:
        assert log_in(client).headers["location"] == "/login?failed=provider"
    assert "status 302" in why(served)


def test_too_many_failures_of_an_address_ask_the_provider_nothing(
    served: Served, provider: OidcProvider
) -> None:
    with served.client() as client:
        for _ in range(credentials.FAILURES_MAX):
            refused = sent_back(client, error="access_denied")
            assert refused.headers["location"] == "/login?failed=denied"
        assert sent_back(client, code="x").headers["location"] == "/login?failed=many"
        assert "Wait a minute" in client.get("/login?failed=many", headers=PAGE).text
        with served.browser(Role.VIEWER) as browser:  # the same address
            assert browser.get("/api/v1/me").status_code == 200
    assert "/token" not in provider.asked


def test_another_page_that_sends_its_visitors_back_keeps_nobody_from_logging_in(served: Served) -> None:
    """An image is enough for that, and the failures are those of the visitor's address."""
    with served.client() as client:
        for _ in range(credentials.FAILURES_MAX):
            client.get("/login/oidc/callback?code=x&state=y")
        refused = client.get("/login/oidc/callback?code=x&state=y")
        assert refused.headers["location"] == "/login?failed=many"
        assert log_in(client).status_code == 200


def sent_back(client: httpx.Client, **answer: str) -> httpx.Response:
    """As the provider would send the browser back."""
    begun = client.get("/login/oidc", headers=PAGE)
    state = parse_qs(urlsplit(begun.headers["location"]).query)["state"][0]
    return client.get("/login/oidc/callback", params={"state": state, **answer}, headers=PAGE)


# -- what must not start ---------------------------------------------------------------------------


def test_what_cannot_work_is_refused_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    good: dict[str, Any] = {"issuer": "https://login.example", "client_id": "umbel", "roles": ROLES}
    here = "https://dash.example"
    for changed, public_url, problem in (
        ({"issuer": "http://login.example"}, here, "does not begin|begins with https://"),
        ({"issuer": "login.example"}, here, "begins with https://"),
        ({"client_id": ""}, here, "needs --oidc-client-id"),
        ({"roles": {}}, here, "no login would succeed"),
        ({"roles": {"ops": "boss"}}, here, "unknown role 'boss' for 'ops'; use one of viewer"),
        ({}, "", "needs --public-url"),
        ({}, "http://dash.example", "--public-url 'http://dash.example' is not an address that begins"),
    ):
        settings = WebSettings(oidc=Oidc(**(good | changed)), public_url=public_url)
        with pytest.raises(ConfigurationError, match=problem):
            check(settings, named_tokens=0)
    settings = WebSettings(oidc=Oidc(**good), public_url=here, host="0.0.0.0")
    check(settings, named_tokens=0)
    assert "secret" not in repr(Oidc(**good, client_secret="a secret"))
    with pytest.raises(ConfigurationError, match="--no-login with --oidc-issuer"):
        check(WebSettings(oidc=Oidc(**good), public_url=here, login=False), named_tokens=0)
    monkeypatch.setattr(settings_module, "find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=r"pip install 'umbel\[oidc\]'"):
        check(settings, named_tokens=0)


def test_the_options_describe_a_provider(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("from a file\n")
    roles = ("ops=operator", "cn=admins,dc=x=admin", "*=viewer")
    found = provider_of("https://x", "umbel", tmp_path / "secret", roles, "groups", ("groups",), "from env")
    assert found is not None and found.client_secret == "from a file"
    assert found.roles == {"ops": Role.OPERATOR, "cn=admins,dc=x": Role.ADMIN, "*": Role.VIEWER}
    found = provider_of("https://x", "umbel", None, roles, "groups", (), "from env")
    assert found is not None and found.client_secret == "from env"
    assert provider_of("", "", None, (), "groups", (), "") is None
    with pytest.raises(ConfigurationError, match="need --oidc-issuer"):
        provider_of("", "umbel", None, (), "groups", (), "")
    for wrong in ("ops", "=admin", "ops=boss", "ops="):
        with pytest.raises(ConfigurationError, match="is not VALUE=ROLE with one of viewer"):
            provider_of("https://x", "umbel", None, (wrong,), "groups", (), "")
