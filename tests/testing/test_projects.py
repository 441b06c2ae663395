"""Projects that are not this one, with Umbel installed from its wheel, run tests with the plugin's fixtures.

`project` and `django_project` are the plugin's own tests. The examples of docs/testing.md and one of those in
examples/ are run beside them. Each has a pytest of its own, in an environment that has the wheel and sees the
libraries of this project's environments, but not their Umbel.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.docs.blocks import DOCS, ROOT, blocks_of

HERE = Path(__file__).parent
CELERY_PYTHON = ROOT / ".venv-celery" / "bin" / "python"  # which has Django
SITE = "import sysconfig; print(sysconfig.get_path('purelib'))"
# Plugins of other tools that are installed here; not all of them have what they need everywhere.
OTHERS = ("schemathesis", "hypothesispytest", "xdist", "xdist.looponfail", "timeout", "platformdirs")
# The last one: each of them would compile Umbel again.
NOT_INHERITED = {"PYTHONPATH", "PYTEST_ADDOPTS", "PYTHONDONTWRITEBYTECODE"}
DEADLINE_S = 240.0


@dataclass(frozen=True)
class Run:
    process: subprocess.Popen[str]

    def ended(self) -> str:
        printed, _ = self.process.communicate(timeout=DEADLINE_S)
        assert self.process.returncode == 0, printed
        return printed


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Run]:
    """All at once: each spends half of its time on imports."""
    home = tmp_path_factory.mktemp("projects")
    wheel = build_wheel(home / "dist")
    python = environment(home / "environment", wheel, [site_of(Path(sys.executable)), site_of(CELERY_PYTHON)])
    folders = (HERE / "project", HERE / "django_project", ROOT / "examples" / "nightly_report")
    projects = [shutil.copytree(folder, home / folder.name) for folder in folders]
    write_blocks(home / "django_project", django=True)
    projects.append(documented(home / "documented"))
    return {folder.name: run_tests(python, folder) for folder in projects}


def build_wheel(folder: Path) -> Path:
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    [wheel] = folder.glob("umbel-*.whl")
    return wheel


def environment(folder: Path, wheel: Path, libraries: Sequence[Path]) -> Path:
    """Its interpreter. Umbel is installed from the wheel; the rest is seen in other environments."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    interpreter = folder / "bin" / "python"
    uv = [sys.executable, "-m", "uv", "pip", "install", "--no-deps", "--no-index", "--no-cache", "--quiet"]
    subprocess.run([*uv, "--python", str(interpreter), str(wheel)], check=True)
    (site_of(interpreter) / "libraries.pth").write_text("\n".join(map(str, libraries)))
    return interpreter


def site_of(python: Path) -> Path:
    found = subprocess.run([python, "-c", SITE], check=True, capture_output=True, text=True)
    return Path(found.stdout.strip())


def run_tests(python: Path, project: Path) -> Run:
    without = [flag for name in OTHERS for flag in ("-p", f"no:{name}")]
    inherited = {name: value for name, value in os.environ.items() if name not in NOT_INHERITED}
    return Run(
        subprocess.Popen(
            [python, "-m", "pytest", "-q", "-rA", "--import-mode=importlib", *without],
            cwd=project,
            env=inherited,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    )


def documented(folder: Path) -> Path:
    """The project that docs/testing.md shows."""
    write_blocks(folder, django=False)
    (folder / "pytest.ini").write_text(
        next(block.text for block in blocks_of(DOCS / "testing.md") if block.language == "ini")
        + "pythonpath = .\nasyncio_default_fixture_loop_scope = function\n"
    )
    several = folder / "tests" / "several"
    (several / "test_app.py").write_text(
        'def test_queue(umbel_app):\n    assert umbel_app.settings.task_default_queue == "tests"\n'
    )
    return folder


def write_blocks(folder: Path, *, django: bool) -> None:
    """Each piece of code as the file that its first line names."""
    for block in blocks_of(DOCS / "testing.md"):
        if block.language == "python" and ("django" in block.text) == django:
            named = re.match(r"# (\S+\.py)\n", block.text)
            assert named, f"{block.place} does not begin with the name of its file"
            place = folder / named[1]
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(block.text)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("project", "ran"),
    [("project", "test_umbel_comes_from_the_wheel"), ("django_project", "test_django.py")],
)
def test_the_plugins_own_tests_pass_in_another_project(
    project: str, ran: str, runs: Mapping[str, Run]
) -> None:
    printed = runs[project].ended()
    assert ran in printed
    assert "skipped" not in printed


@pytest.mark.timeout(300)
def test_the_examples_of_the_documentation_pass(runs: Mapping[str, Run]) -> None:
    printed = runs["documented"].ended()
    shown = [block for block in blocks_of(DOCS / "testing.md") if block.language == "python"]
    tests = re.findall(
        r"def (test_\w+)", "\n".join(block.text for block in shown if "django" not in block.text)
    )
    assert len(tests) > 10
    assert not [name for name in tests if not re.search(rf"PASSED \S+::{name}\b", printed)]


@pytest.mark.timeout(300)
def test_an_example_project_passes_its_tests(runs: Mapping[str, Run]) -> None:
    assert "2 passed" in runs["nightly_report"].ended()
