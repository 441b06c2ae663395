"""D4: every command finds the lake in the same way: --lake, UMBEL_HISTORY_LAKE, the app's, the default."""

import json
from pathlib import Path

import pytest

from tests.cli.running import Ran, Umbel
from tests.history.published import Story, publish
from umbel.cli import exits

APP = "from umbel import App\n\napp = App('shop', broker='sqlite:///q.db', history_lake={lake!r})\n"


@pytest.fixture(autouse=True)
def lakes(tmp_path: Path) -> None:
    """Each has another number of tasks."""
    for number, name in enumerate(("named", "by-variable", "of-app", "umbel-lake"), start=1):
        publish(tmp_path / name, Story(tasks=number).rows)


def count_of(ran: Ran) -> int:
    assert ran.code == exits.OK, ran
    return len(json.loads(ran.out))


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
    assert "ZeroDivisionError" in err and "using the lake umbel-lake" in err
    assert len(err.splitlines()) == 1
    code, _, err = umbel("history", "tasks", "-A", "tasks")
    assert code == exits.USAGE and "ZeroDivisionError" in err


def test_a_file_that_is_no_app_is_passed_over(umbel: Umbel, tmp_path: Path) -> None:
    (tmp_path / "tasks.py").write_text("x = 1\n")
    code, out, err = umbel("history", "tasks", "--json")
    assert (code, len(json.loads(out)), err) == (exits.OK, 4, "")


@pytest.mark.parametrize(
    "command",
    ["record", "record status", "record compact", "history build", "history tasks", "task show 1", "dev"],
)
def test_a_lake_that_is_an_address_is_refused_with_the_remedy(
    umbel: Umbel, tmp_path: Path, command: str
) -> None:
    """A bucket was recorded into a local folder `gs:`."""
    code, _, err = umbel(*command.split(), "--lake", "gs://key:hunter2@bucket/x")
    assert code == exits.USAGE, err
    assert "gs:// is not supported" in err
    assert "give the path of a folder, such as /srv/umbel-lake, or s3://bucket/prefix" in err
    assert "hunter2" not in err
    assert not list(tmp_path.glob("gs*"))


def test_a_lake_may_be_named_as_a_file_address(umbel: Umbel, tmp_path: Path) -> None:
    publish(tmp_path / "a lake", Story(tasks=5).rows)
    assert count_of(umbel("history", "tasks", "--json", "--lake", f"file://{tmp_path}/a%20lake")) == 5


def test_a_worker_records_into_no_address(umbel: Umbel, tmp_path: Path) -> None:
    (tmp_path / "tasks.py").write_text(APP.format(lake="of-app"))
    code, _, err = umbel("worker", "--record", "gs://bucket/x")
    assert code == exits.USAGE and "gs:// is not supported" in err
