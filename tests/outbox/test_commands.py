"""`umbel outbox`: make the table, show what waits, repair."""

import json
import sqlite3
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from tests.commanding import run_here
from tests.outbox.places import Place
from umbel import App
from umbel.errors import BadURL, ConfigurationError, OutboxUnavailable
from umbel.outbox.addresses import parse_address
from umbel.outbox.database import OutboxDatabase
from umbel.outbox.dialects import DEFAULT_TABLE, Statements

TASKS = "from umbel import App\napp = App('shop', broker='sqlite:///umbel.db')\n"


def umbel(home: Path, *words: str, outbox: str | None = None) -> CompletedProcess[str]:
    (home / "tasks.py").write_text(TASKS)
    environment = {} if outbox is None else {"UMBEL_OUTBOX": outbox}
    return run_here(["outbox", *words, "-A", "tasks"], home, environment, "tasks")


def test_the_table_is_made_looked_at_and_repaired(app: App, place: Place, tmp_path: Path) -> None:
    place.run("DROP TABLE umbel_outbox")
    missing = umbel(tmp_path, "status", outbox=place.url)
    assert missing.returncode == 1 and "umbel outbox create" in missing.stderr
    for _ in range(2):
        assert umbel(tmp_path, "create", outbox=place.url).returncode == 0
    with place.connection() as connection:
        with app.outbox(connection):
            sent = [app.tasks["shop.pay"].delay(number).id for number in range(2)]
        connection.commit()
    place.run("UPDATE umbel_outbox SET problem = 'full' WHERE task_id = ?", sent[0])
    (row,) = json.loads(umbel(tmp_path, "status", "--json", outbox=place.url).stdout)
    assert row["oldest_s"] >= 0
    assert row == {
        "database": place.url,
        "waiting": 1,
        "oldest_s": row["oldest_s"],
        "published": 0,
        "last_published_at": None,
        "relay": None,
        "set_aside": 1,
        "problems": [{"row": 1, "task_id": sent[0], "problem": "full"}],
    }
    shown = umbel(tmp_path, "status", outbox=place.url).stdout
    assert f"set aside: row 1, task {sent[0]}: full" in shown and "- none -" in shown
    assert umbel(tmp_path, "retry", outbox=place.url).stdout == "1 to be published again\n"
    (row,) = json.loads(umbel(tmp_path, "status", "--json", outbox=place.url).stdout)
    assert (row["waiting"], row["set_aside"]) == (2, 0)


def test_what_waits_is_shown_without_the_broker(
    app: App, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place(f"sqlite:///{tmp_path}/shop.db")
    place.create()
    monkeypatch.setenv("UMBEL_BROKER", "redis://127.0.0.1:1/0")
    monkeypatch.setenv("UMBEL_CONNECT_TIMEOUT_S", "0.2")
    done = umbel(tmp_path, "status", "--json", outbox=place.url)
    assert done.returncode == 0 and "who publishes is not known" in done.stderr
    assert json.loads(done.stdout)[0]["waiting"] == 0


def test_options_of_an_address_are_kept(place: Place) -> None:
    if place.is_sqlite:
        pytest.skip("its address has none")
    place.run("CREATE SCHEMA apart")
    apart = OutboxDatabase(
        parse_address(f"{place.url}?options=-csearch_path%3Dapart&application_name=mine"), DEFAULT_TABLE
    )
    with pytest.raises(OutboxUnavailable, match="is missing"):
        apart.fetch()
    apart.create()
    assert apart.fetch() == []
    apart.close()
    place.run("INSERT INTO apart.umbel_outbox (task_id, message) VALUES ('x', 'y')")


def test_the_statements_are_printed_for_migrations(tmp_path: Path) -> None:
    printed = umbel(tmp_path, "sql", outbox="sqlite:///shop.db").stdout
    with sqlite3.connect(":memory:") as connection:
        connection.executescript(printed)
    connection.close()
    postgresql = umbel(tmp_path, "sql", "--dialect", "postgresql", "--table", "jobs.sent").stdout
    assert (
        "CREATE TABLE IF NOT EXISTS jobs.sent (" in postgresql and "sent_waiting ON jobs.sent" in postgresql
    )
    refused = umbel(tmp_path, "sql")
    assert refused.returncode == 2 and "names no outbox" in refused.stderr


@pytest.mark.parametrize("url", ["mysql://host/db", "shop.db", "sqlite://", "sqlite:///:memory:"])
def test_an_address_that_cannot_be_used_is_refused(url: str) -> None:
    with pytest.raises(BadURL):
        parse_address(url)


def test_one_database_has_one_lease_however_it_is_spelled() -> None:
    same = [
        "postgresql://ada:secret@Host/shop",
        "postgres://bob@host:5432/shop?sslmode=require",
        "postgresql+psycopg://host/shop",
    ]
    assert len({parse_address(one).lease(DEFAULT_TABLE) for one in same}) == 1
    others = ["postgresql://host/other", "postgresql://host:5433/shop", "sqlite:////shop"]
    assert len({parse_address(one).lease(DEFAULT_TABLE) for one in [same[0], *others]}) == 4
    assert parse_address(same[0]).lease("a") != parse_address(same[0]).lease("b")
    assert "secret" not in repr(parse_address(same[0]))


def test_a_name_of_a_table_is_a_name() -> None:
    with pytest.raises(ConfigurationError, match="outbox_table"):
        Statements(parse_address("sqlite:///a").dialect, "x; DROP TABLE users")


def test_outboxes_are_one_or_several_and_shown_without_passwords(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = App("a", directory=tmp_path, outbox="postgresql://ada:secret@h1,h2/shop").settings
    assert one.outboxes == ("postgresql://ada:secret@h1,h2/shop",)
    assert one.shown()["outbox"] == ["postgresql://ada:***@h1,h2/shop"] and "secret" not in repr(one)
    several = App("a", directory=tmp_path, outbox=["sqlite:///shop.db", "postgresql://h/b"]).settings
    assert several.outboxes == (f"sqlite:///{tmp_path.resolve()}/shop.db", "postgresql://h/b")
    monkeypatch.setenv("UMBEL_OUTBOX", '["sqlite:////a.db", "sqlite:////b.db"]')
    assert App("a", directory=tmp_path).settings.outboxes == ("sqlite:////a.db", "sqlite:////b.db")
    monkeypatch.setenv("UMBEL_OUTBOX", "postgresql://h1,h2/shop")
    assert App("a", directory=tmp_path).settings.outboxes == ("postgresql://h1,h2/shop",)
    monkeypatch.delenv("UMBEL_OUTBOX")
    assert App("a", directory=tmp_path).settings.outboxes == ()
