"""Flask: the extension takes its settings from the site, and runs tasks in the application context."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from flask import Flask, current_app, g, has_app_context

from umbel.contrib.flask import Umbel
from umbel.errors import ConfigurationError
from umbel.testing import embedded
from umbel.testing.worker import EmbeddedWorker

STORE = Path(__file__).resolve().parents[2] / "examples" / "flask_store"


class Site:
    """A site by a factory, whose tasks say where they run."""

    def __init__(self, directory: Path) -> None:
        self.umbel = Umbel(directory=directory)
        self.ended: list[str] = []
        self.where = self.umbel.task(name="where")(_where)
        self.awaited = self.umbel.task(name="awaited")(_awaited)
        self.double = self.umbel.task(name="double")(_double)

    def create_app(self, name: str, **settings: object) -> Flask:
        app = Flask(name)
        app.config["UMBEL"] = settings
        app.teardown_appcontext(lambda _error: self.ended.append(name))
        self.umbel.init_app(app)
        return app


def _where() -> list[object]:
    g.calls = g.get("calls", 0) + 1
    return [current_app.name, g.calls]


async def _awaited() -> list[object]:
    return _where()


def _double(number: int) -> str:
    return f"{current_app.name} {2 * number}"


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path)
    yield made
    made.umbel.close()


def test_settings_come_from_the_site_and_it_knows_its_extension(site: Site) -> None:
    app = site.create_app("store", task_default_queue="store", task_routes={"double": "slow"})
    assert app.extensions["umbel"] is site.umbel
    assert site.umbel.settings.task_default_queue == "store"
    assert site.umbel.task_queues() == {"store", "slow"}
    assert site.umbel.settings.broker.startswith("sqlite:///")
    site.create_app("next")
    assert site.umbel.settings.task_default_queue == "celery", "nothing is left of the site before"


def test_the_environment_and_the_constructor_count_as_for_any_app(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UMBEL_LEASE_S", "7")
    app = Flask("store")
    app.config["UMBEL"] = {"lease_s": 3.0}
    umbel = Umbel(app, directory=tmp_path, task_acks_late=False)
    assert (umbel.settings.lease_s, umbel.settings.task_acks_late) == (7.0, False)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"brokr": "redis://"},
            r"""unknown setting 'brokr' in app.config\["UMBEL"\]; did you mean 'broker'\?""",
        ),
        ({"lease_s": "long"}, "is 'long': must be a number"),
        ("redis://:hunter2@host", r"""^app.config\["UMBEL"\] is of type str: it must be a dict, such as"""),
    ],
)
def test_a_wrong_setting_is_refused_with_the_remedy(given: object, said: str, site: Site) -> None:
    app = Flask("store")
    app.config["UMBEL"] = given
    with pytest.raises(ConfigurationError, match=said):
        site.umbel.init_app(app)


def test_each_task_has_an_application_context_of_its_own(site: Site, tmp_path: Path) -> None:
    app = site.create_app("store")
    with embedded(site.umbel, tmp_path):
        worker = EmbeddedWorker(site.umbel, tmp_path)
        worker.start()
        try:
            sent = [task.delay() for task in (site.where, site.where, site.awaited, site.awaited)]
            assert [one.get(timeout=30) for one in sent] == [["store", 1]] * 4
            assert site.double.map([1, 2]).delay().get(timeout=30) == ["store 2", "store 4"]
        finally:
            worker.stop()
        assert site.ended == ["store"] * 5
        assert not has_app_context()
        with site.umbel.eager(), app.app_context():
            g.calls = 7
            assert site.where.delay().get() == ["store", 1], "not that of the caller"
            assert site.where() == ["store", 8], "called as a function, it is one"


def test_a_test_keeps_its_broker_when_it_makes_the_site(site: Site, tmp_path: Path) -> None:
    with embedded(site.umbel, tmp_path):
        site.create_app("store", broker="redis://127.0.0.1:1/0")
        assert site.umbel.settings.broker == f"sqlite:///{tmp_path / 'umbel.db'}"
        with site.umbel.eager():
            assert site.where.delay().get() == ["store", 1]
    site.create_app("store", broker="redis://127.0.0.1:1/0")
    assert site.umbel.settings.broker == "redis://127.0.0.1:1/0"


def test_a_worker_without_an_application_does_not_start(tmp_path: Path) -> None:
    store = shutil.copytree(STORE, tmp_path / "store")
    words = ["worker", "-A", "tasks:umbel", "-P", "threads", "--run-dir", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "umbel", *words],
        cwd=store,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode != 0
    assert "call umbel.init_app(app) in the module that -A names" in done.stderr
