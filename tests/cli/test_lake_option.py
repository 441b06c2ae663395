"""D4: every command finds the lake in the same way: --lake, UMBEL_HISTORY_LAKE, the app's, the default."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.history.published import Story, publish
from umbel.cli import exits
from umbel.cli.main import main

APP = "from umbel import App\n\napp = App('shop', broker='sqlite:///q.db', history_lake={lake!r})\n"


class Umbel:
    """The command in this process, in a folder of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch, self._capsys = monkeypatch, capsys

    def __call__(self, *arguments: str) -> tuple[int, str, str]:
        self._monkeypatch.setattr(sys, "argv", ["umbel", *arguments])
        forget_apps()
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = self._capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return ended.value.code, out, err


@pytest.fixture
def umbel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Umbel]:
    monkeypatch.chdir(tmp_path)
    for name in ("UMBEL_APP", "UMBEL_HISTORY_LAKE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for number, name in enumerate(("named", "by-variable", "of-app", "umbel-lake"), start=1):
        publish(tmp_path / name, Story(tasks=number).rows)
    yield Umbel(monkeypatch, capsys)
    forget_apps()


def forget_apps() -> None:
    """./tasks.py of one command is not that of the next."""
    for name in ("tasks", "shop"):
        sys.modules.pop(name, None)


def count_of(ran: tuple[int, str, str]) -> int:
    assert ran[0] == exits.OK, ran
    return len(json.loads(ran[1]))


def test_the_lake_is_the_one_named_then_the_apps_then_the_default(
    umbel: Umbel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D4: each lake here has another number of tasks."""
    listed = ("history", "tasks", "--json")
    assert count_of(umbel(*listed)) == 4
    (tmp_path / "shop.py").write_text(APP.format(lake="of-app"))
    assert count_of(umbel(*listed)) == 4
    assert count_of(umbel("-A", "shop", *listed)) == 3
    assert count_of(umbel(*listed, "-A", "shop")) == 3
    (tmp_path / "tasks.py").write_text(APP.format(lake="of-app"))
    assert count_of(umbel(*listed)) == 3
    monkeypatch.setenv("UMBEL_HISTORY_LAKE", "by-variable")
    assert count_of(umbel(*listed, "-A", "shop")) == 2
    assert count_of(umbel(*listed, "--lake", "named", "-A", "shop")) == 1


def test_recording_and_reading_go_by_the_same_rule(umbel: Umbel, tmp_path: Path) -> None:
    (tmp_path / "tasks.py").write_text(APP.format(lake="of-app"))
    _, out, _ = umbel("record", "status", "--json")
    assert json.loads(out)["lake"] == str(tmp_path / "of-app")
    _, out, _ = umbel("record", "status", "--json", "-b", "sqlite:///q.db")
    assert json.loads(out)["lake"] == str(tmp_path / "umbel-lake"), "with a broker named no app is loaded"
    code, _, err = umbel("history", "build")
    assert (code, "there are no events in" in err, "of-app" in err) == (exits.NOT_FOUND, True, True)


def test_an_app_that_cannot_be_loaded_is_said_once_and_refused_when_named(
    umbel: Umbel, tmp_path: Path
) -> None:
    (tmp_path / "tasks.py").write_text("1 / 0\n")
    code, out, err = umbel("history", "tasks", "--json")
    assert (code, len(json.loads(out))) == (exits.OK, 4)
    assert "ZeroDivisionError" in err and "taking umbel-lake for the lake" in err
    assert len(err.splitlines()) == 1
    code, _, err = umbel("history", "tasks", "-A", "tasks")
    assert code == exits.USAGE and "ZeroDivisionError" in err


def test_a_file_that_is_no_app_is_passed_over(umbel: Umbel, tmp_path: Path) -> None:
    (tmp_path / "tasks.py").write_text("x = 1\n")
    code, out, err = umbel("history", "tasks", "--json")
    assert (code, len(json.loads(out)), err) == (exits.OK, 4, "")
