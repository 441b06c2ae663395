"""What other users put into a shared temporary folder is refused, and nothing of this user is overwritten."""

import grp
import logging
import os
import pwd
import socket
import sqlite3
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from tests.other_user import (
    UID,
    as_another_user,
    needs_two_users,
    plant_file,
    plant_folder,
    plant_link,
    shared_folder,
)
from umbel import logs
from umbel.app.app import App
from umbel.brokers.sqlite import wakeup
from umbel.brokers.sqlite.wakeup import Bell, poke
from umbel.cli.history.report import write_page
from umbel.errors import AccessRefused, BadSetting, ConfigurationError
from umbel.files import READ_MAX, UntrustedFile, make_own, private_folder, refuse_planted
from umbel.stores.interface import Unavailable
from umbel.stores.local import store_at
from umbel.web.journal import Journal
from umbel.worker.daemon import pid_file
from umbel.worker.run_directory import forget_dead, read_states, remove_state, state_file, write_state
from umbel.worker.steps.state_store import SavedState, read_saved_state, saved_state_file, write_saved_state

NODE, BROKER = "w@host", "sqlite:////q.db"
STATE = SavedState(NODE, 7, 8)


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    return shared_folder(tmp_path / "shared")


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A file of this user that nobody else may write to."""
    path = tmp_path / "victim"
    path.write_text("precious")
    return path


USES: dict[str, Callable[[Path], object]] = {
    "write_state": lambda folder: write_state(folder, NODE, BROKER, {"pid": 1}),
    "read_states": read_states,
    "forget_dead": forget_dead,
    "remove_state": lambda folder: remove_state(folder, NODE, BROKER),
    "save": lambda folder: write_saved_state(saved_state_file(folder, NODE, BROKER), STATE),
    "read_saved": lambda folder: read_saved_state(saved_state_file(folder, NODE, BROKER)),
}


# -- the run directory -----------------------------------------------------------------------------


@needs_two_users
@pytest.mark.parametrize("use", USES)
def test_a_run_directory_that_another_user_made_is_refused(shared: Path, victim: Path, use: str) -> None:
    folder = shared / f"umbel-{os.getuid()}"
    plant_folder(folder)
    state = state_file(folder, NODE, BROKER)
    plant_file(state, '{"node": "w@host", "pid": 1, "updated_boot_s": 0}')
    for draft in (state.with_suffix(f".{os.getpid()}.tmp"), state.with_suffix(f".{os.getpid()}.draft")):
        plant_link(draft, victim)  # where drafts were, by the number of the process
    with pytest.raises(ConfigurationError, match=rf"another user \(uid {UID}\).*--run-dir or UMBEL_RUN_DIR"):
        USES[use](folder)
    assert victim.read_text() == "precious"
    assert state.exists()


@pytest.mark.parametrize("use", USES)
def test_a_run_directory_that_is_a_link_is_refused(tmp_path: Path, use: str) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "run").symlink_to("elsewhere")
    with pytest.raises(ConfigurationError, match="is a link to elsewhere; name the folder itself"):
        USES[use](tmp_path / "run")
    assert not list((tmp_path / "elsewhere").iterdir())


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o1777])
@pytest.mark.parametrize("use", USES)
def test_a_run_directory_that_others_may_write_to_is_refused(tmp_path: Path, use: str, mode: int) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(ConfigurationError, match=r"other users may write to .* run: chmod go-w"):
        USES[use](folder)
    assert not list(folder.iterdir())


def test_no_link_in_a_private_folder_is_followed(tmp_path: Path, victim: Path) -> None:
    with private_folder(tmp_path / "own", make=True) as folder:
        for name in ("w.json", f".w.json.{os.getpid()}"):
            (tmp_path / "own" / name).symlink_to(victim)
        with pytest.raises(OSError, match="Too many levels"):
            folder.read("w.json")
        folder.replace("w.json", b"new")
        assert folder.read("w.json") == b"new" and folder.names("") == ["w.json"]
    assert victim.read_text() == "precious"


def test_what_is_no_file_or_too_large_is_not_read(tmp_path: Path) -> None:
    with private_folder(tmp_path / "own", make=True) as folder:
        os.mkfifo(tmp_path / "own" / "pipe")
        with pytest.raises(UntrustedFile, match="not a regular file"):
            folder.read("pipe")
        (tmp_path / "own" / "large").write_bytes(b"x" * (READ_MAX + 1))
        with pytest.raises(OSError, match="more than"):
            folder.read("large")


@needs_two_users
def test_root_may_look_at_the_run_directory_of_another_user_that_it_names(shared: Path) -> None:
    folder = shared / "theirs"
    as_another_user(shared, "os.mkdir('theirs', 0o700)")
    assert read_states(folder, of_any_user=True) == [] and forget_dead(folder, of_any_user=True) == 0


def test_a_run_directory_that_is_none_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    with pytest.raises(ConfigurationError, match="cannot be read: Not a directory"):
        read_states(tmp_path / "run")


# -- files that a person names ---------------------------------------------------------------------


def _logged(path: Path) -> None:
    try:
        logs.set_up_logging("info", logfile=str(path), node=NODE)
        logging.getLogger("umbel").info("a secret of this user")
    finally:
        logs.forget_logging()


def _pid(path: Path) -> None:
    with pid_file(str(path)):
        pass


def _queue(path: Path) -> None:
    with closing(App("planted", broker=f"sqlite:///{path}")) as app:
        app.send("planted.task", (), {}, {})


NAMED: dict[str, tuple[Callable[[Path], object], type[Exception]]] = {
    "log": (_logged, BadSetting),
    "pid": (_pid, BadSetting),
    "database": (_queue, AccessRefused),
    "dashboard": (lambda path: Journal(path).close(), ConfigurationError),
}


@needs_two_users
@pytest.mark.parametrize("use", NAMED)
def test_a_file_that_another_user_put_into_a_shared_folder_is_refused(shared: Path, use: str) -> None:
    open_it, error = NAMED[use]
    path = shared / "named"
    plant_file(path)
    with pytest.raises(error, match=rf"another user \(uid {UID}\)"):
        open_it(path)
    assert path.read_bytes() == b"" and path.stat().st_uid == UID


@needs_two_users
@pytest.mark.parametrize("use", NAMED)
def test_a_link_that_another_user_put_into_a_shared_folder_is_not_followed(
    shared: Path, tmp_path: Path, use: str
) -> None:
    open_it, error = NAMED[use]
    target = tmp_path / "target"
    plant_link(shared / "named", target)
    with pytest.raises(error, match=rf"another user \(uid {UID}\)"):
        open_it(shared / "named")
    assert not target.exists()


@pytest.mark.parametrize("use", NAMED)
def test_files_of_this_user_in_a_shared_folder_are_used(shared: Path, use: str) -> None:
    open_it, _ = NAMED[use]
    open_it(shared / "named")
    open_it(shared / "named")


@needs_two_users
def test_a_database_is_not_used_with_a_lock_file_of_another_user(shared: Path, tmp_path: Path) -> None:
    plant_link(shared / "queue.db-lock", tmp_path / "target")
    with pytest.raises(AccessRefused, match="another user"):
        _queue(shared / "queue.db")
    assert not (tmp_path / "target").exists()


@needs_two_users
@pytest.mark.parametrize("side", ["-wal", "-shm", "-journal"])
@pytest.mark.parametrize("use", ["database", "dashboard"])
def test_a_database_is_not_used_with_a_log_of_another_user(shared: Path, use: str, side: str) -> None:
    """SQLite would apply what they wrote: tasks for the workers, a login to the dashboard."""
    open_it, error = NAMED[use]
    open_it(shared / "used")
    for path in (shared / "used", shared / "new"):
        plant_file(path.with_name(f"{path.name}{side}"), "theirs")
        with pytest.raises(error, match=rf"{path.name}{side} belongs to another user \(uid {UID}\)"):
            open_it(path)


@needs_two_users
def test_a_lake_that_another_user_made_is_refused(shared: Path) -> None:
    plant_folder(shared / "lake")
    with pytest.raises(Unavailable, match=r"another user .* name another folder for the lake"):
        store_at(shared / "lake")


def test_a_second_name_of_a_file_is_refused_in_a_shared_folder(shared: Path, victim: Path) -> None:
    os.link(victim, shared / "named")
    with pytest.raises(UntrustedFile, match="second name"):
        make_own(shared / "named")
    os.link(victim, victim.parent / "own")
    make_own(victim.parent / "own")  # this folder is nobody else's
    refuse_planted(shared / "nothing")


def test_a_report_overwrites_no_file_behind_a_link(shared: Path, victim: Path) -> None:
    (shared / f".report.html.{os.getpid()}").symlink_to(victim)
    write_page(shared / "report.html", "<p>")
    assert (shared / "report.html").read_text() == "<p>" and victim.read_text() == "precious"


# -- the sockets that wake up waiters --------------------------------------------------------------


def poke_as_another_user(bell: Bell, times: int) -> None:
    assert bell.address is not None
    code = (
        "out = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM); "
        "[out.sendto(b'', bytes.fromhex(sys.argv[1])) for _ in range(int(sys.argv[2]))]"
    )
    as_another_user(Path("/"), code, bell.address.hex(), times)


@pytest.fixture
def database(tmp_path: Path) -> Path:
    path = tmp_path / "queue.db"
    sqlite3.connect(path).close()
    path.touch(mode=0o600)
    path.chmod(0o600)
    return path


@needs_two_users
def test_a_poke_of_another_user_wakes_nobody(database: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bell, woken = Bell(database), threading.Event()
    monkeypatch.setattr(bell, "recheck_s", 3600.0)
    assert bell.address is not None

    def wait() -> None:
        bell.wait(3600.0)
        woken.set()

    poke_as_another_user(bell, 5)
    assert not bell.drain()
    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    poke_as_another_user(bell, 5)
    assert not woken.is_set()
    assert poke({bell.address: ()}) == set()
    assert woken.wait(60)
    waiting.join()
    bell.close()


@needs_two_users
def test_a_user_who_floods_a_bell_is_not_listened_to(
    database: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(wakeup, "STRANGERS_MAX", 5)
    bell = Bell(database)
    assert bell.address is not None
    while not bell.is_flooded:
        poke_as_another_user(bell, 6)
        assert not bell.drain()
    assert bell.recheck_s == wakeup.POLL_S
    bell.wait(3600.0)  # returns although nobody pokes: it polls
    bell.close()
    assert [record.uid for record in caplog.records] == [UID]  # type: ignore[attr-defined]


def test_who_may_write_to_the_database_may_wake_those_who_read_it(database: Path) -> None:
    us = frozenset({os.getuid(), 0})
    assert wakeup.writers_of(database) == us
    database.chmod(0o666)
    assert wakeup.writers_of(database) is None
    assert wakeup.writers_of(database.parent / "none") == us
    bell = Bell(database)
    assert bell.address is not None
    assert poke({bell.address: ()}) == set() and bell.drain()
    assert not bell.drain()
    bell.close()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as gone:
        assert poke({bell.address: ()}) == {bell.address}, gone


def test_members_of_the_group_may_wake_where_it_may_write(
    database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grp, "getgrgid", lambda _gid: type("Group", (), {"gr_mem": ["nobody", "gone"]}))
    monkeypatch.setattr(pwd, "getpwnam", {"nobody": type("User", (), {"pw_uid": UID})}.__getitem__)
    wakeup._writers.cache_clear()
    assert UID not in (wakeup.writers_of(database) or ())
    database.chmod(0o660)
    assert UID in (wakeup.writers_of(database) or ())
    wakeup._writers.cache_clear()
