"""Modules of tasks that an app names and that are imported when all its tasks are needed."""

import subprocess
import sys
from pathlib import Path

import pytest

from umbel import App
from umbel.errors import AppNotFound
from umbel.launch.loading import load_app

APP = """
from umbel import App

app = App("shop")
app.autodiscover_tasks({packages})
"""
TASKS = """
from discovered_{name}.queue import app


@app.task(name="{name}.pay")
def pay(): ...
"""


def project(tmp_path: Path, name: str, packages: str, tasks: str = TASKS) -> str:
    package = tmp_path / f"discovered_{name}"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "queue.py").write_text(APP.format(packages=packages))
    (package / "tasks.py").write_text(tasks.format(name=name))
    (package / "jobs.py").write_text(tasks.format(name=name).replace(".pay", ".jobs"))
    return f"discovered_{name}.queue"


def test_loading_an_app_imports_the_modules_that_it_names(tmp_path: Path) -> None:
    target = project(tmp_path, "a", '["discovered_a", "json"]')  # json has no tasks
    assert list(load_app(target, str(tmp_path)).tasks) == ["a.pay"]


def test_the_modules_may_have_another_name_and_come_from_a_function(tmp_path: Path) -> None:
    target = project(tmp_path, "b", 'lambda: ["discovered_b"], related_name="jobs"')
    assert list(load_app(f"{target}:app", str(tmp_path)).tasks) == ["b.jobs"]
    whole = project(tmp_path, "c", '["discovered_c.jobs"], related_name=None')
    assert list(load_app(whole, str(tmp_path)).tasks) == ["c.jobs"]


def test_importing_the_app_does_not_import_them(tmp_path: Path) -> None:
    target = project(tmp_path, "d", '"discovered_d"')
    script = f"import {target} as m; print(list(m.app.tasks)); print('d.pay' in m.app.all_tasks())"
    found = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert found.stdout.split("\n")[:2] == ["[]", "True"]


def test_a_module_that_cannot_be_imported_is_named_with_its_place(tmp_path: Path) -> None:
    target = project(tmp_path, "e", '["discovered_e"]', tasks="import not_{name}_there\n")
    with pytest.raises(AppNotFound, match=r"importing tasks failed: .*not_e_there.*tasks\.py, line 1"):
        load_app(target, str(tmp_path))


def test_without_packages_they_are_the_installed_apps_of_django(monkeypatch: pytest.MonkeyPatch) -> None:
    app = App("shop")
    app.autodiscover_tasks()
    assert app.all_tasks()  # no process of Django: nothing to find
