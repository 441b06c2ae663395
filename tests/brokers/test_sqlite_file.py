"""The embedded broker and its file: what is refused, what survives, what a full disk does."""

import gc
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.brokers.contract_processes import ROOT
from tests.brokers.under_test import (
    OWNER,
    QUEUE,
    BrokerUnderTest,
    outgoing,
    result,
    run,
    take,
    take_one,
    texts,
)
from umbel.brokers.interface import Ack, BrokerSettings
from umbel.brokers.registry import open_broker, open_producer
from umbel.brokers.sqlite import schema
from umbel.brokers.sqlite.database import Database
from umbel.brokers.sqlite.files import TRIES, network_file_system, path_from_url, prepare
from umbel.brokers.sqlite.store import CAPABILITIES
from umbel.errors import AccessRefused, BadURL, BrokerError, BrokerUnavailable, StorageFull


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "umbel.db"


@pytest.fixture
def under_test(path: Path) -> Iterator[BrokerUnderTest]:
    under_test = BrokerUnderTest(BrokerSettings(f"sqlite:///{path}", connect_timeout_s=0.3), CAPABILITIES)
    yield under_test
    under_test.close()


def refusal(url: str, expected: type[BrokerError] = BrokerUnavailable) -> str:
    """What publishing there and opening a broker there both say."""
    settings = BrokerSettings(url, connect_timeout_s=0.3)
    with pytest.raises(expected) as refused:
        open_producer(settings).publish(outgoing("a"))

    async def scenario() -> None:
        with pytest.raises(expected):
            await open_broker(settings).open()

    run(scenario())
    text = str(refused.value)
    assert "\n" not in text
    return text


def waiting(under_test: BrokerUnderTest) -> list[str]:
    async def scenario() -> list[str]:
        async with under_test.open() as broker:
            return texts(await broker.peek(QUEUE, 1_000_000))

    return run(scenario())


# ---- addresses -------------------------------------------------------------------------------------


def test_an_address_names_a_file_relative_or_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert path_from_url("sqlite:///umbel.db") == tmp_path / "umbel.db"
    assert path_from_url("sqlite:///a%20b/../c.db") == tmp_path / "c.db"
    assert path_from_url("sqlite:////var/lib/x.db") == Path("/var/lib/x.db")


@pytest.mark.parametrize(
    "url",
    [
        "sqlite:",
        "sqlite://",
        "sqlite:///",
        "sqlite://host/x.db",
        "sqlite:x.db",
        "sqlite:///dir/",
        "sqlite:///:memory:",
        "sqlite:///x.db?mode=ro",
        "sqlite:///x.db#y",
        "sqlite:///x%00.db",
    ],
)
def test_an_address_without_a_file_is_refused(url: str) -> None:
    with pytest.raises(BadURL, match="sqlite"):
        open_producer(BrokerSettings(url))


def test_an_unknown_scheme_is_refused_with_the_known_ones() -> None:
    for url in ("carrier-pigeon://roof", "umbel.db", ""):
        with pytest.raises(BadURL, match=r"known schemes: .*sqlite"):
            open_broker(BrokerSettings(url))


def test_a_database_that_is_dropped_closes_its_connection(tmp_path: Path) -> None:
    database = Database(tmp_path / "umbel.db", timeout_s=1.0)
    with database.read() as db:
        connection = db
    del database, db
    gc.collect()
    with pytest.raises(sqlite3.ProgrammingError, match="closed"):
        connection.execute("SELECT 1")


def test_the_file_is_for_its_owner_only_and_a_missing_directory_is_not_made(tmp_path: Path) -> None:
    producer = open_producer(BrokerSettings(f"sqlite:///{tmp_path}/umbel.db"))
    producer.publish(outgoing("a"))
    assert (tmp_path / "umbel.db").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "umbel.db-wal").stat().st_mode & 0o777 == 0o600
    producer.close()
    mistyped = open_producer(BrokerSettings(f"sqlite:///{tmp_path}/new/deeper/umbel.db"))
    with pytest.raises(
        AccessRefused, match=r"no directory .*/new/deeper for the database umbel\.db; create it"
    ):
        mistyped.publish(outgoing("a"))
    mistyped.close()
    assert not (tmp_path / "new").exists()


# ---- places that cannot hold a broker --------------------------------------------------------------


def test_a_read_only_place_is_named() -> None:
    # Root may write anywhere but in the kernel's own file systems.
    for path in ("/proc/umbel.db", "/sys/kernel/umbel.db", "/proc/none/umbel.db"):
        text = refusal(f"sqlite:///{path}")
        assert path.rsplit("/", 1)[0] in text


def test_a_directory_a_text_and_another_programs_database_are_refused(tmp_path: Path) -> None:
    (tmp_path / "directory").mkdir()
    assert "is not a file" in refusal(f"sqlite:///{tmp_path / 'directory'}")
    (tmp_path / "text").write_text("I am no database. " * 1000)
    assert "is not a usable database" in refusal(f"sqlite:///{tmp_path / 'text'}")
    with closing(sqlite3.connect(tmp_path / "foreign")) as db:
        db.execute("CREATE TABLE theirs (x)")
    assert "another program" in refusal(f"sqlite:///{tmp_path / 'foreign'}")
    with closing(sqlite3.connect(tmp_path / "foreign")) as db:
        assert db.execute("SELECT count(*) FROM sqlite_master").fetchone() == (1,)


def test_a_damaged_database_is_refused_and_left_as_it_is(under_test: BrokerUnderTest, path: Path) -> None:
    under_test.producer().publish(outgoing("a"))
    under_test.close()
    damaged = path.read_bytes()[:100] + b"\xff" * 5000
    path.write_bytes(damaged)
    assert "move it away" in refusal(under_test.settings.url)
    assert path.read_bytes() == damaged


MOUNTS = """\
22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
30 22 0:30 / /mnt/nfs rw - nfs4 server:/export rw,vers=4.2
31 22 0:31 / /mnt/my\\040share rw shared:5 - cifs //server/share rw
32 22 0:32 / /srv/remote rw - fuse.sshfs u@host: rw
33 30 254:1 / /mnt/nfs/local rw - xfs /dev/vdb rw
34 22 0:34 / /mnt/ntfs rw - fuseblk /dev/sdc rw
"""


@pytest.mark.parametrize(
    ("directory", "kind"),
    [
        ("/var/lib", None),
        ("/mnt", None),
        ("/mnt/nfs", "nfs4"),
        ("/mnt/nfs/deeper/still", "nfs4"),
        ("/mnt/nfsother", None),
        ("/mnt/my share/x", "cifs"),
        ("/srv/remote", "fuse.sshfs"),
        ("/mnt/nfs/local/x", None),
        ("/mnt/ntfs", None),
    ],
)
def test_network_file_systems_are_recognised(directory: str, kind: str | None) -> None:
    assert network_file_system(MOUNTS, Path(directory)) == kind


def test_a_file_on_a_network_file_system_is_refused_before_it_is_made(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounts = path.parent / "mountinfo"
    mounts.write_text(f"{MOUNTS}40 22 0:40 / {path.parent} rw - nfs server:/x rw\n")
    monkeypatch.setattr("umbel.brokers.sqlite.files._MOUNTS", mounts)
    assert "network file system (nfs)" in refusal(f"sqlite:///{path}")
    assert not path.exists()


def test_a_lock_held_too_long_is_reported_and_nothing_is_changed(
    under_test: BrokerUnderTest, path: Path
) -> None:
    producer = under_test.producer()
    producer.publish(outgoing("a"))
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(BrokerUnavailable, match=r"stayed locked by another process for 0\.3 s"):
            producer.publish(outgoing("b"))
        other.execute("ROLLBACK")
    producer.publish(outgoing("c"))
    assert waiting(under_test) == ["a", "c"]


# ---- versions --------------------------------------------------------------------------------------


def test_a_file_of_a_newer_version_is_refused(under_test: BrokerUnderTest, path: Path) -> None:
    under_test.producer().publish(outgoing("a"))
    with closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA user_version = 99")
    assert "newer Umbel (schema 99" in refusal(under_test.settings.url)


def test_an_older_file_is_brought_up_to_date_step_by_step(path: Path) -> None:
    steps = (
        "CREATE TABLE one (x);\nINSERT INTO one VALUES (1);\n",
        "ALTER TABLE one ADD COLUMN y DEFAULT 2;\n",
    )
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        assert schema.migrate(db, path, steps[:1]) == 0
        assert schema.migrate(db, path, steps) == 1
        assert schema.migrate(db, path, steps) == 2
        assert db.execute("SELECT * FROM one").fetchall() == [(1, 2)]


def test_a_migration_that_fails_changes_nothing(
    under_test: BrokerUnderTest, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    under_test.producer().publish(outgoing("a"))
    under_test.close()
    broken = (*schema.MIGRATIONS, "CREATE TABLE half (x);\nINSERT INTO missing VALUES (1);\n")
    monkeypatch.setattr(schema, "MIGRATIONS", broken)
    with pytest.raises(AccessRefused, match="no such table: missing"):
        under_test.producer().publish(outgoing("b"))
    monkeypatch.undo()
    assert waiting(under_test) == ["a"]
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("SELECT name FROM sqlite_master WHERE name = 'half'").fetchone() is None


def test_processes_that_create_the_file_at_once_agree(under_test: BrokerUnderTest) -> None:
    command = [sys.executable, "-m", "tests.brokers.processes", "send", under_test.settings.url]
    senders = [subprocess.Popen([*command, str(number)], cwd=ROOT) for number in range(6)]
    assert [sender.wait(timeout=60) for sender in senders] == [0] * 6
    assert sorted(waiting(under_test)) == list("012345")


# ---- a full disk -----------------------------------------------------------------------------------


def test_a_full_disk_is_one_clear_error_and_leaves_everything_usable(
    under_test: BrokerUnderTest, path: Path
) -> None:
    full = replace(under_test.settings, storage_max_bytes=300_000)
    producer = open_producer(full)

    async def scenario() -> None:
        broker = open_broker(full)
        await broker.open()
        await broker.publish(outgoing("first"))
        held = await take_one(broker)
        batch = outgoing(*("x" * 5000 for _ in range(10)))
        with pytest.raises(StorageFull, match="raise storage_max_bytes") as refused:
            any(producer.publish(batch) for _ in range(100))  # type: ignore[func-returns-value]
        assert str(path) in str(refused.value)
        ready = (await broker.queues())[QUEUE].ready
        assert ready % len(batch) == 0  # whole batches only

        # A verdict whose result has no room is not applied, and the claim stands.
        with pytest.raises(StorageFull):
            await broker.settle([Ack(held.tag, [result("task", value="x" * 100_000)])])
        assert (await broker.queues())[QUEUE].claimed == 1
        assert (await broker.settle([Ack(held.tag)])).applied == 1

        # Room again: everything goes on with the same connections.
        deliveries = (await take(broker, 1000)).deliveries
        assert len(deliveries) == ready
        await broker.settle([Ack(delivery.tag) for delivery in deliveries])
        producer.publish(batch)
        await broker.close()

    run(scenario())
    producer.close()


# ---- the log ---------------------------------------------------------------------------------------


def test_the_log_is_longer_than_what_is_sent_and_a_copy_of_it_has_every_message(
    under_test: BrokerUnderTest, path: Path, tmp_path: Path
) -> None:
    """A send that does not make the file longer is flushed in one write of the disk instead of two."""
    producer = open_producer(under_test.settings)
    log, sizes = Path(f"{path}-wal"), list[int]()
    for number in range(200):
        producer.publish(outgoing(str(number)))
        sizes.append(log.stat().st_size)
    assert len(set(sizes)) <= 10

    copy = tmp_path / "copy.db"  # as after a power cut: what is behind the last commit is zeros
    for side in ("", "-wal"):
        shutil.copy(f"{path}{side}", f"{copy}{side}")
    producer.close()
    with closing(sqlite3.connect(copy)) as db:
        assert db.execute("SELECT count(*) FROM messages").fetchone() == (200,)
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)


# ---- death and rebirth -----------------------------------------------------------------------------


def test_a_process_killed_in_mid_transaction_leaves_nothing_half_done(
    under_test: BrokerUnderTest,
) -> None:
    under_test.producer().publish(outgoing("whole"))
    under_test.close()
    command = [sys.executable, "-m", "tests.brokers.processes", "die_writing", under_test.settings.url]
    assert subprocess.run(command, cwd=ROOT, check=False).returncode == -9
    under_test.producer().publish(outgoing("after"))
    assert waiting(under_test) == ["whole", "after"]
    with closing(sqlite3.connect(path_from_url(under_test.settings.url))) as db:
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_after_a_reboot_nothing_is_held_any_more(
    under_test: BrokerUnderTest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def before() -> int:
        async with under_test.open() as broker:
            await broker.publish(outgoing("a"))
            await take_one(broker)
            return (await broker.coordination.acquire_lease("beat", OWNER, ttl_s=3600)).term

    async def after(term: int) -> None:
        async with under_test.open() as broker:
            again = await take_one(broker)
            assert (texts([again]), again.redelivered) == (["a"], True)
            lease = await broker.coordination.acquire_lease("beat", "other", ttl_s=3600)
            assert lease.granted and lease.term > term

    term = run(before())
    (tmp_path / "boot_id").write_text("another boot\n")
    monkeypatch.setattr("umbel.brokers.sqlite.coordination._BOOT_ID", tmp_path / "boot_id")
    run(after(term))


def test_a_fork_that_bypasses_the_hooks_is_refused_in_the_child(
    under_test: BrokerUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer = under_test.producer()
    producer.publish(outgoing("a"))
    monkeypatch.setattr(os, "getpid", lambda: -1)
    with pytest.raises(BrokerUnavailable, match="was in use while this process was forked"):
        producer.publish(outgoing("b"))
    with pytest.raises(BrokerUnavailable, match="after the fork"):
        under_test.producer().publish(outgoing("c"))
    monkeypatch.undo()
    monkeypatch.setattr("umbel.brokers.sqlite.database._refused", set())
    assert waiting(under_test) == ["a"]


@pytest.mark.parametrize("removals", [1, TRIES])
def test_a_file_that_is_removed_while_it_is_looked_at_is_made_again(
    removals: int, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = removals

    def removed_meanwhile(looked_at: Path) -> None:
        nonlocal left
        if left:
            left -= 1
            looked_at.unlink()

    monkeypatch.setattr("umbel.brokers.sqlite.files.refuse_planted_beside", removed_meanwhile)
    if removals < TRIES:
        prepare(path)
        assert path.is_file()
    else:
        with pytest.raises(AccessRefused, match="another process removes the database"):
            prepare(path)
    assert left == 0
