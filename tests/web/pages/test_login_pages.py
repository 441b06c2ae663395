"""Logging in and out in the real browser: at an identity provider on another site, and by a token."""

from collections.abc import Iterator
from time import time

import pytest
from playwright.sync_api import expect, sync_playwright

from tests.servers.ports import free_port
from tests.waiting import wait_until
from tests.web.oidc_provider import CLIENT, SECRET, OidcProvider, providing
from tests.web.pages.shop import CHROMIUM, Looker
from tests.web.serving import serving
from umbel.app.app import App
from umbel.web import hub, visitors
from umbel.web.oidc import CALLBACK
from umbel.web.settings import Oidc, Role


@pytest.fixture(scope="module")
def provider() -> Iterator[OidcProvider]:
    with pytest.MonkeyPatch.context() as patch, providing() as found:
        patch.setenv("AUTHLIB_INSECURE_TRANSPORT", "1")
        found.asks = True  # the way back begins on the provider's site
        yield found


@pytest.fixture(scope="module")
def looker(provider: OidcProvider, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Looker]:
    home, port = tmp_path_factory.mktemp("login-pages"), free_port()
    public_url = f"http://localhost:{port}"  # the provider is at 127.0.0.1, which is another site
    provider.redirect_uri = f"{public_url}{CALLBACK}"
    of_provider = Oidc(
        issuer=provider.url, client_id=CLIENT, client_secret=SECRET, roles={"ops": Role.OPERATOR}
    )
    app = App("asked", broker=f"sqlite:///{home / 'queue.db'}")
    with (
        serving(app, home / "web.db", port=port, oidc=of_provider, public_url=public_url) as served,
        sync_playwright() as playwright,
    ):
        served.url = public_url
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield Looker(app, served, browser)
        browser.close()


def test_a_person_logs_in_at_the_provider_and_out_again(looker: Looker) -> None:
    context = looker.browser.new_context()
    page = looker.look(context)
    page.goto(looker.served.url)
    page.get_by_role("link", name="Log in at 127.0.0.1").click()
    page.get_by_role("link", name="Approve").click()
    page.wait_for_url(f"{looker.served.url}/")  # the page that goes on by itself has done so
    expect(page.locator(".foot")).to_contain_text("ann, operator")
    cookie = next(
        cookie for cookie in context.cookies() if cookie.get("name", "").startswith("umbel_session")
    )
    assert cookie.get("httpOnly") and cookie.get("sameSite") == "Strict"
    assert [error for error in looker.errors if looker.served.url in error] == []
    page.get_by_role("button", name="Log out").click()
    page.wait_for_url(f"{looker.served.url}/login")
    assert [found for found in context.cookies() if found.get("name", "").startswith("umbel_session")] == []
    looker.errors.clear()  # the provider has no icon, and the stream ends with the session
    context.close()


def test_an_open_page_goes_to_the_login_when_its_session_ends(
    looker: Looker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "JUDGE_S", 0.05)
    context = looker.visit(Role.VIEWER)
    page = looker.look(context)
    page.goto(looker.served.url)
    page.wait_for_function("document.getElementById('link').textContent === 'live'")
    now = time() + 2 * 1800
    monkeypatch.setattr(visitors, "time", lambda: now)
    page.wait_for_url(f"{looker.served.url}/login")
    looker.errors.clear()  # the browser reports that the stream was refused
    context.close()


def test_live_parts_say_that_nobody_asked_for_them(looker: Looker) -> None:
    context = looker.visit(Role.VIEWER)
    page, asked = looker.look(context), list[tuple[str, bool]]()
    page.on("request", lambda one: asked.append((one.url, "x-umbel-live" in one.headers)))
    page.goto(f"{looker.served.url}/tasks")
    page.wait_for_function("document.getElementById('link').textContent === 'live'")
    looker.served.dashboard.cluster.model.changes.note("tasks", "t1")
    looker.served.dashboard.cluster.model.changes.note("health", "")
    wait_until(lambda: (page.title(), any("part=" in url for url, _ in asked))[1], what="a live part")
    parts = [is_live for url, is_live in asked if "part=" in url]
    assert parts and all(parts)
    assert (f"{looker.served.url}/tasks", False) in asked
    assert looker.errors == []
    context.close()
