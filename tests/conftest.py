"""What holds for every test: how properties are searched, a world without UMBEL_* variables, Ctrl-C."""

import asyncio.events
import os
import signal
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from compileall import compile_dir
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, settings
from xdist.scheduler import LoadFileScheduling

import umbel
from tests.dealing import LongestFirst, unit_of
from tests.servers.rabbitmq import delete_vhosts
from tests.servers.shared import begin_run, end_run, join_run
from umbel.app.settings import ENVIRONMENT_PREFIX, ENVIRONMENT_RESERVED

# New examples on every run, in CI too; a failing one prints the blob that brings it back. No
# deadline: how long an example takes says more about the machine than about the code.
EXAMPLES = 100  # of each property, unless it says otherwise; a run that is waited for draws fewer
settings.register_profile(
    "umbel",
    max_examples=EXAMPLES if os.environ.get("UMBEL_SOAK") else EXAMPLES * 2 // 5,
    deadline=None,
    derandomize=False,
    print_blob=True,
)
# A mutant is killed by any failing example; nobody reads the smallest one.
settings.register_profile(
    "mutants",
    settings.get_profile("umbel"),
    max_examples=EXAMPLES,
    phases=[Phase.explicit, Phase.generate],
    report_multiple_bugs=False,
)
settings.load_profile("umbel")

# A shell has what it starts in the background ignore Ctrl-C, and children inherit that; tests send it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    """What holds for the whole run is done once, whether its tests are shared by processes or not."""
    if hasattr(config, "workerinput"):
        join_run(Path(config.workerinput["run"]))
        return
    config.stash[RUN] = begin_run()
    # Hundreds of processes import Umbel: where Python is told to keep no bytecode, each would compile it.
    compile_dir(Path(umbel.__file__).parent, quiet=2)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    node.workerinput["run"] = str(node.config.stash[RUN])


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    try:
        yield
    finally:
        if nextitem is None or unit_of(file_of(nextitem)) != unit_of(file_of(item)):
            delete_vhosts()


def file_of(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]


SHORT_S = 600  # no single test may hold up `make test` for longer: a hang is then a failure with its stacks


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.environ.get("UMBEL_SOAK"):
        return
    for item in items:
        limit = item.get_closest_marker("timeout")
        if limit is not None and limit.args[0] > SHORT_S:
            item.add_marker(pytest.mark.timeout(SHORT_S), append=False)


RUN = pytest.StashKey[Path]()
RELEASE_0_3 = "f8599897"


@pytest.fixture(scope="session")
def old_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package as released in 0.3.0, for workers of that version in a cluster: its PYTHONPATH."""
    repository = Path(__file__).resolve().parent.parent
    command = ["git", "-C", str(repository), "archive", "--format=tar", RELEASE_0_3, "src"]
    try:
        archive = subprocess.run(command, capture_output=True, check=False)
    except FileNotFoundError:
        pytest.skip("git is not installed")
    if archive.returncode:
        pytest.skip(f"this checkout has no commit {RELEASE_0_3}: its history is cut, or it is no clone")
    folder = tmp_path_factory.mktemp("umbel-0.3.0")
    with tarfile.open(fileobj=BytesIO(archive.stdout)) as files:
        files.extractall(folder, filter="data")
    return folder / "src"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling:
    return LongestFirst(config, log)


def pytest_unconfigure() -> None:
    end_run()
    # DuckDB reports leaks of its own when a process ends, which behind the summary reads as a failure.
    if "duckdb" in sys.modules:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith(ENVIRONMENT_PREFIX) and name not in ENVIRONMENT_RESERVED:
            monkeypatch.delenv(name)


@pytest.fixture
def on_uvloop(monkeypatch: pytest.MonkeyPatch) -> None:
    """`asyncio.run` in this test makes uvloop's loops, as a worker with `umbel[uvloop]` does."""
    uvloop = pytest.importorskip("uvloop", reason="uvloop is not installed")
    monkeypatch.setattr(asyncio.events, "new_event_loop", uvloop.new_event_loop)
