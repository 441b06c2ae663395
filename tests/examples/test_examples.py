"""Each example does what its README says: the commands of its console block are run as printed.

It runs in a copy of its folder, so its `umbel.db` is private, with one worker. A line that ends in `&` is
started in the background. `...` in a printed line stands for anything.
"""

import doctest
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.servers.ports import free_port
from tests.servers.postgres import ask_postgres, postgres_url
from tests.waiting import wait_until

__all__ = ["postgres_url"]

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
PROJECTS = sorted(path.parent.name for path in EXAMPLES.glob("*/README.md"))
COMMAND_S = 90.0
STOP_S = 30.0
CODE_LINES_MAX = 120
PORTS = {"server.py": "SMTP_PORT", "uvicorn": "PORT"}  # which variable says where a server listens


@dataclass(frozen=True)
class Step:
    command: str
    printed: str

    @property
    def in_background(self) -> bool:
        return self.command.endswith("&")


def steps_of(readme: str) -> list[Step]:
    (block,) = re.findall(r"```console\n(.*?)```", readme, re.DOTALL)
    said = [part.partition("\n") for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]]
    return [Step(command, printed) for command, _, printed in said]


def environment_for(home: Path) -> dict[str, str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    ports = {name: str(free_port()) for name in PORTS.values()}
    return {**os.environ, "PATH": path, "UMBEL_RUN_DIR": str(home / "run"), **ports}


@contextmanager
def in_background(command: str, home: Path, environment: dict[str, str]) -> Iterator[None]:
    words = (
        re.sub(r"\$\{(\w+):-\w+\}", lambda named: environment[named[1]], command).removesuffix("&").split()
    )
    log = home / f"{words[-1]}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(words, cwd=home, env=environment, stdout=output, stderr=output)
    try:
        yield
    except BaseException:
        print(f"--- log of {command}\n{log.read_text()[-4000:]}")
        raise
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            raise


def wait_for_server(port: str) -> None:
    address = ("127.0.0.1", int(port))
    with socket.socket() as probe:
        wait_until(lambda: probe.connect_ex(address) == 0, what="the example's server")


def run(step: Step, home: Path, environment: dict[str, str]) -> str:
    done = subprocess.run(
        ["bash", "-c", step.command],
        cwd=home,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=COMMAND_S,
        check=False,
    )
    assert done.returncode == 0, f"{step.command} ended with {done.returncode}: {done.stderr}"
    as_printed = doctest.OutputChecker().check_output(step.printed, done.stdout, doctest.ELLIPSIS)
    assert as_printed, f"{step.command} printed:\n{done.stdout}\nand its README says:\n{step.printed}"
    return done.stderr


@pytest.mark.timeout(300)
@pytest.mark.parametrize("project", PROJECTS)
def test_an_example_prints_what_its_readme_says(project: str, tmp_path: Path) -> None:
    notes = run_readme(project, tmp_path, environment_for(tmp_path))
    if project == "etl":
        assert "%" in notes, "no progress was shown"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("project", ["django_store", "flask_store"])
def test_a_store_does_the_same_on_postgresql(project: str, tmp_path: Path, postgres_url: str) -> None:
    run_readme(project, tmp_path, environment_for(tmp_path) | database_at(postgres_url))
    orders = {"django_store": "store_order", "flask_store": "orders"}[project]
    assert ask_postgres(postgres_url, f"SELECT state FROM {orders}") == [("packed",)]


def database_at(url: str) -> dict[str, str]:
    place = urlsplit(url)
    return {
        "DATABASE_URL": url.replace("postgresql:", "postgresql+psycopg:"),
        "PGHOST": place.hostname or "",
        "PGPORT": str(place.port),
        "PGUSER": place.username or "",
        "PGDATABASE": place.path.strip("/"),
    }


def run_readme(project: str, folder: Path, environment: dict[str, str]) -> str:
    """Run its commands; what they wrote beside their answers."""
    home = shutil.copytree(EXAMPLES / project, folder / project)
    notes = ""
    with ExitStack() as background:
        for step in steps_of((home / "README.md").read_text()):
            if step.in_background:
                background.enter_context(in_background(step.command, home, environment))
                for server in (one for one in PORTS if one in step.command):
                    wait_for_server(environment[PORTS[server]])
            else:
                notes += run(step, home, environment)
    return notes


def test_the_index_names_every_example() -> None:
    named = re.findall(r"^\| \[(\w+)\]\(\1/\) \|", (EXAMPLES / "README.md").read_text(), re.MULTILINE)
    assert sorted(named) == PROJECTS


@pytest.mark.parametrize("project", PROJECTS)
def test_an_example_is_small_and_uses_the_public_api_only(project: str) -> None:
    sources = [path.read_text() for path in (EXAMPLES / project).rglob("*.py")]
    assert sum(bool(line.strip()) for source in sources for line in source.splitlines()) <= CODE_LINES_MAX
    assert not any(
        re.search(r"(from|import) umbel\.(?!testing import|contrib\.|errors import)", source)
        for source in sources
    )
