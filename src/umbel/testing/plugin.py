"""The pytest plugin: fixtures for projects that use Umbel. pytest finds it by the entry point `pytest11`.

pytest imports it wherever Umbel is installed, so it imports nothing of Umbel before a test uses a fixture.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from umbel.app.app import App
    from umbel.testing.bench import Bench, Clock
    from umbel.testing.inbox import Inbox
    from umbel.testing.worker import EmbeddedWorker

INI = "umbel_app"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the setting `umbel_app` of pytest."""
    parser.addini(INI, "Umbel: the app under test, as module:attribute. Without it, umbel_app is a new app.")


@pytest.fixture
def umbel_settings() -> dict[str, Any]:
    """Settings of the app under test; override this fixture to change them."""
    return {}


@pytest.fixture
def umbel_app(
    pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory, umbel_settings: dict[str, Any]
) -> "Iterator[App]":
    """The app under test, on an embedded broker in a temporary folder."""
    from umbel.testing.worker import app_under_test, embedded

    target = str(pytestconfig.getini(INI) or "")
    with embedded(
        app_under_test(target, pytestconfig.rootpath), tmp_path_factory.mktemp("umbel"), **umbel_settings
    ) as app:
        yield app


@pytest.fixture
def _umbel_bench(umbel_app: "App", tmp_path_factory: pytest.TempPathFactory) -> "Bench":
    from umbel.testing.bench import Bench

    return Bench(umbel_app, tmp_path_factory.mktemp("umbel-run"))


@pytest.fixture
def umbel_worker(_umbel_bench: "Bench") -> "Iterator[EmbeddedWorker]":
    """A worker that runs the sent calls in threads of this process."""
    with _umbel_bench.worker("umbel_worker") as worker:
        yield worker


@pytest.fixture
def umbel_eager(_umbel_bench: "Bench") -> "Iterator[App]":
    """The app; its tasks run at once, in the thread that sends them."""
    with _umbel_bench.stage("umbel_eager", at_once=True):
        yield _umbel_bench.app


@pytest.fixture
def umbel_inbox(_umbel_bench: "Bench") -> "Iterator[Inbox]":
    """The calls that were sent and have not run: a test checks them, then runs them."""
    from umbel.testing.inbox import Inbox

    with _umbel_bench.stage("umbel_inbox", at_once=False) as stage:
        yield Inbox(stage)


@pytest.fixture
def umbel_clock(_umbel_bench: "Bench") -> "Iterator[Clock]":
    """A clock that the test moves: countdowns, retries and periodic tasks come due without waiting."""
    with _umbel_bench.clock() as clock:
        yield clock
