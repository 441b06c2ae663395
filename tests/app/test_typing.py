"""What the type checkers of a user, and Umbel at run time, say about tasks used rightly and wrongly."""

import asyncio
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from mypy import api

from tests.app.typing_cases import PLAIN, PRELUDE, RIGHT, WRONG

ROOT = Path(__file__).resolve().parents[2]
CASES = [*RIGHT, *WRONG]


def source() -> str:
    """All cases as one module, each a function of one line."""
    bodies = [f"async def case_{number}() -> None: {code}" for number, code in enumerate([*CASES, *PLAIN])]
    return "\n".join([PRELUDE.rstrip("\n"), *bodies, ""])


def complaints(lines: set[int]) -> list[str]:
    """The cases that have an error in one of these lines; what else is wrong by its line."""
    first = len(PRELUDE.splitlines()) + 1
    every = [*CASES, *PLAIN]
    return sorted(every[line - first] if line >= first else f"line {line} of the prelude" for line in lines)


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("cases") / "cases.py"
    file.write_text(source())
    return file


def test_the_table_has_cases_enough() -> None:
    assert len(set(CASES)) == len(CASES) >= 60


def test_mypy_accepts_the_right_and_rejects_the_wrong(module: Path) -> None:
    config, cache = ROOT / "pyproject.toml", ROOT / ".mypy_cache"
    options = ["--config-file", str(config), "--cache-dir", str(cache), "--no-error-summary", "--no-pretty"]
    out, err, _ = api.run([*options, str(module)])
    found = {int(line) for line in re.findall(r"^\S+?:(\d+): error: ", out, re.MULTILINE)}
    assert (complaints(found), err) == (sorted([*WRONG, *PLAIN]), ""), out


def test_basedpyright_accepts_the_right_and_rejects_the_wrong(module: Path) -> None:
    config = {
        "include": [module.name],
        "extraPaths": [str(ROOT / "src")],
        "typeCheckingMode": "standard",
        "pythonVersion": "3.11",
    }
    module.with_name("pyrightconfig.json").write_text(json.dumps(config))
    options = ["--outputjson", "--pythonpath", sys.executable, "-p", str(module.parent)]
    command = [sys.executable, "-m", "basedpyright", *options]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    told = json.loads(answer.stdout)["generalDiagnostics"]
    found = {one["range"]["start"]["line"] + 1 for one in told if one["severity"] == "error"}
    assert complaints(found) == sorted([*WRONG, *PLAIN]), answer.stdout


@pytest.fixture(scope="module")
def running(module: Path) -> Any:
    made = ModuleType("cases")
    exec(compile(module.read_text(), str(module), "exec"), made.__dict__)
    return made


@pytest.mark.parametrize("code", RIGHT)
def test_what_is_right_runs(running: Any, code: str) -> None:
    asyncio.run(getattr(running, f"case_{CASES.index(code)}")())


@pytest.mark.parametrize("code", WRONG)
def test_what_is_wrong_raises(running: Any, code: str) -> None:
    with pytest.raises((TypeError, AttributeError)):
        asyncio.run(getattr(running, f"case_{CASES.index(code)}")())
