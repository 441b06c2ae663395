"""`umbel web`: what its options and variables become."""

import json
import logging
from pathlib import Path

import pytest

from tests.cli.running import Umbel
from umbel.cli import exits
from umbel.logs import forget_logging
from umbel.web.server import Server
from umbel.web.settings import Role, WebSettings


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[WebSettings]:
    """The settings of a dashboard that is not served."""
    found: list[WebSettings] = []

    def run(server: Server) -> None:
        found.append(server.dashboard.settings)
        logging.getLogger("umbel.web").warning("served", extra={"port": 7})
        server.dashboard.journal.close()
        server.started = True

    monkeypatch.setattr(Server, "run", run)
    monkeypatch.setattr("os.nice", lambda _by: None)
    monkeypatch.setattr("os.getsid", lambda _pid: -1)
    return found


def test_a_provider_is_described_by_options_and_variables(
    umbel: Umbel, started: list[WebSettings], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UMBEL_WEB_OIDC_SECRET", "from the environment")
    monkeypatch.setenv("UMBEL_WEB_OIDC_CLIENT_ID", "umbel")
    monkeypatch.setenv("UMBEL_WEB_PUBLIC_URL", "https://umbel.example")
    of_provider = (
        "--oidc-issuer",
        "https://login.example",
        "--oidc-role",
        "ops=operator",
        "--oidc-scope",
        "groups",
    )
    where = ("-b", f"sqlite:///{tmp_path}/queue.db", "--state", str(tmp_path / "web.db"))
    ran = umbel("web", *where, *of_provider, "--idle", "5", "--trusted-proxy", "10.0.0.5")
    forget_logging()
    assert ran.code == exits.OK, ran.err
    (settings,) = started
    assert settings.oidc is not None and settings.oidc.client_secret == "from the environment"
    assert (settings.oidc.client_id, settings.oidc.roles, settings.oidc.scopes) == (
        "umbel",
        {"ops": Role.OPERATOR},
        ("groups",),
    )
    assert (settings.session_idle_s, settings.public_url) == (300.0, "https://umbel.example")
    assert settings.proxies == ("10.0.0.5",) and settings.user_header == ""


def test_the_log_of_the_dashboard_is_json_where_that_is_wanted(
    umbel: Umbel, started: list[WebSettings], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UMBEL_LOG_FORMAT", "json")
    where = ("-b", f"sqlite:///{tmp_path}/queue.db", "--state", str(tmp_path / "web.db"))
    ran = umbel("web", *where)
    forget_logging()
    assert ran.code == exits.OK and len(started) == 1
    (line,) = [json.loads(line) for line in ran.err.splitlines() if line.startswith("{")]
    assert (line["message"], line["level"], line["port"]) == ("served", "warning", 7)
    assert line["time"].endswith("+00:00")


def test_what_describes_no_provider_is_one_error(umbel: Umbel, tmp_path: Path) -> None:
    where = ("-b", f"sqlite:///{tmp_path}/queue.db", "--state", str(tmp_path / "web.db"))
    ran = umbel("web", *where, "--oidc-role", "ops=operator")
    forget_logging()
    assert ran.code == exits.USAGE and "need --oidc-issuer" in ran.err
