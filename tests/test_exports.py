"""The public API, and what it costs to import. What is not pinned here may change at any time."""

import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import umbel
from umbel import errors

PUBLIC = [
    "App",
    "Task",
    "Signature",
    "chain",
    "group",
    "chord",
    "AsyncResult",
    "GroupResult",
    "StampingVisitor",
    "ElectionContext",
    "Rate",
    "Concurrency",
    "Ignore",
    "Reject",
    "Retry",
    "errors",
    "__version__",
]


def test_the_public_names_are_these() -> None:
    assert umbel.__all__ == PUBLIC


def test_every_public_name_is_there() -> None:
    for name in PUBLIC:
        assert getattr(umbel, name) is not None
    assert umbel.errors is errors
    assert umbel.Retry is errors.Retry


def test_any_other_name_is_missing_as_in_every_module() -> None:
    with pytest.raises(AttributeError, match="module 'umbel' has no attribute 'Celery'"):
        getattr(umbel, "Celery")  # noqa: B009 (a type checker must not judge this)


def test_names_can_be_taken_by_a_star() -> None:
    assert set(PUBLIC) <= set(_run("from umbel import *; result = list(globals())"))


def test_the_version_is_that_of_the_package() -> None:
    from importlib.metadata import version

    assert umbel.__version__ == version("umbel")


def test_the_docstring_of_errors_draws_every_error() -> None:
    drawn = errors.__doc__ or ""
    for name, value in vars(errors).items():
        if isinstance(value, type) and issubclass(value, Exception) and value.__module__ == errors.__name__:
            assert f" {name} " in drawn or drawn.endswith(name) or f"\n{name}\n" in drawn, name


def test_every_command_has_its_module() -> None:
    main = import_module("umbel.cli.main")
    for name, place in main.COMMANDS.items():
        assert place.load().name == name


# -- laziness --------------------------------------------------------------------------------------

# None of these may be loaded by those who only look whether workers are well.
HEAVY = {"asyncio", "sqlite3", "rich", "msgspec", "logging", "umbel.app", "umbel.wire", "umbel.brokers"}


def _run(code: str, *, cwd: Path | None = None) -> list[str]:
    """Run it in a fresh interpreter; what it leaves in `result`."""
    code = f"{code}\nimport json, sys\nsys.stderr.write(json.dumps(result))"
    command = [sys.executable, "-c", code]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, cwd=cwd, timeout=60)
    result: list[str] = json.loads(ran.stderr)
    return result


def heavy_in(modules: list[str]) -> set[str]:
    return {heavy for heavy in HEAVY for module in modules if f"{module}.".startswith(f"{heavy}.")}


def test_importing_umbel_loads_next_to_nothing() -> None:
    assert heavy_in(_run("import sys, umbel\nresult = list(sys.modules)")) == set()


def test_importing_the_command_loads_no_command() -> None:
    modules = _run("import sys, umbel.cli.main\nresult = list(sys.modules)")
    assert heavy_in(modules) == set()
    assert {name for name in modules if name.startswith("umbel.cli.")} == {
        "umbel.cli.main",
        "umbel.cli.exits",
        "umbel.cli.lazy",
    }


def test_health_loads_neither_the_app_nor_a_loop_nor_a_database(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        f"sys.argv = ['umbel', 'health', '--json', '--run-dir', {str(tmp_path)!r}]\n"
        "from umbel.cli.main import main\n"
        "sys.stderr = open('/dev/null', 'w')\n"
        "try:\n    main()\n"
        "except SystemExit as ended:\n    assert ended.code == 3\n"
        "sys.stderr = sys.__stderr__\n"
        "result = list(sys.modules)"
    )
    modules = _run(code)
    assert "umbel.worker.run_directory" in modules
    assert heavy_in(modules) == set()


def test_an_app_opens_nothing_and_loads_no_database_until_it_is_used(tmp_path: Path) -> None:
    code = "import sys\nfrom umbel import App\nApp('shop')\nresult = list(sys.modules)"
    modules = _run(code, cwd=tmp_path)
    assert not heavy_in(modules) & {"sqlite3", "rich"}
    assert list(tmp_path.iterdir()) == []
