"""`umbel outbox`: make the table, show what waits, repair."""

import json
import sqlite3
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

from tests.commanding import run_here
from tests.outbox.places import Place
from umbel import App
from umbel.errors import BadSetting, BadURL, ConfigurationError, OutboxUnavailable
from umbel.outbox.database import OutboxDatabase, need_driver, parse_address
from umbel.outbox.table import DEFAULT_TABLE, Problem, Statements

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
    assert umbel(tmp_path, "retry", outbox=place.url).stdout == "1 row to publish again\n"
    (row,) = json.loads(umbel(tmp_path, "status", "--json", outbox=place.url).stdout)
    assert (row["waiting"], row["set_aside"]) == (2, 0)


def test_the_file_of_a_database_is_made_with_its_table_and_by_nothing_else(tmp_path: Path) -> None:
    file, url = tmp_path / "new.db", f"sqlite:///{tmp_path}/new.db"
    refused = umbel(tmp_path, "status", outbox=url)
    assert refused.returncode == 1 and "the file does not exist" in refused.stderr and not file.exists()
    made = umbel(tmp_path, "create", outbox=url)
    assert made.returncode == 0 and made.stdout + made.stderr == f"outbox ready in {url} (a new file)\n"
    again = umbel(tmp_path, "create", outbox=url)
    assert again.stdout + again.stderr == f"outbox ready in {url}\n"
    nowhere = umbel(tmp_path, "create", outbox=f"sqlite:///{tmp_path}/no/new.db")
    assert nowhere.returncode == 1 and "the folder does not exist" in nowhere.stderr


@pytest.mark.parametrize("table", ["SCHEMA.sent", "order", "SCHEMA.select", "Mixed", "long" + 59 * "x"])
def test_any_name_of_a_table_can_be_used(place: Place, table: str) -> None:
    table = table.replace("SCHEMA", "main" if place.is_sqlite else "public")
    name = table.rpartition(".")[2]
    database = OutboxDatabase(parse_address(place.url), table)
    database.create()
    with place.connection() as connection:
        app = App("shop", broker="memory://", outbox_table=table)
        with app.outbox(connection):
            app.send_task("t")
        connection.commit()
        catalog = "SELECT count(*) FROM sqlite_master WHERE type = 'index' AND tbl_name = ?"
        if not place.is_sqlite:
            catalog = "SELECT count(*) - 1 FROM pg_indexes WHERE tablename = %s"  # its key
        assert connection.execute(catalog, (name,)).fetchone() == (1,)
    (row,) = database.fetch()
    database.settle([], [Problem(row.row_id, "full")])
    assert database.counts()[::2] == (0, 1) and len(database.problems()) == 1 == database.retry()
    database.settle([row.row_id])
    assert database.fetch() == []
    database.close()
    app.close()


def test_what_waits_is_shown_without_the_broker(
    app: App, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place(f"sqlite:///{tmp_path}/shop.db")
    place.create()
    monkeypatch.setenv("UMBEL_BROKER", "redis://127.0.0.1:1/0")
    monkeypatch.setenv("UMBEL_CONNECT_TIMEOUT_S", "0.2")
    done = umbel(tmp_path, "status", "--json", outbox=place.url)
    assert done.returncode == 0 and "cannot read which node publishes" in done.stderr
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
        'CREATE TABLE IF NOT EXISTS "jobs"."sent" (' in postgresql
        and '"sent_waiting" ON "jobs"."sent"' in postgresql
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


@pytest.mark.parametrize(
    "url",
    [
        "sqlite:////srv/shop.db",
        "postgresql://u@localhost/shop",
        "postgresql://127.0.0.2:5433/shop",
        "postgresql://[::1]/shop",
        "postgresql:///shop",
        "postgresql:///shop?host=/run/pg",
        "postgresql://%2Frun%2Fpg/shop",
        "postgresql://db/shop?hostaddr=127.0.0.1",
    ],
)
def test_a_database_of_this_host_is_another_one_on_the_next(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PGHOST", raising=False)
    here = parse_address(url).lease(DEFAULT_TABLE)
    assert parse_address(url).lease(DEFAULT_TABLE) == here
    monkeypatch.setattr("socket.gethostname", lambda: "elsewhere")
    assert parse_address(url).lease(DEFAULT_TABLE) != here


def test_a_database_that_all_reach_is_the_same_on_every_host(monkeypatch: pytest.MonkeyPatch) -> None:
    spellings = [
        ["postgresql://u:p@DB/shop", "postgresql:///shop?host=db&password=q&sslmode=require",
         "postgresql://db:5432/?dbname=shop", "postgresql://db?port=5432&dbname=shop"],
        ["postgresql://a,b:5433/shop", "postgresql:///shop?host=a,b&port=5432,5433"],
        ["postgresql://?service=shop&password=p", "postgresql:///?service=shop&user=u"],
        ["postgresql://[2001:db8::1]/shop", "postgresql://[2001:DB8::1]:5432/shop"],
    ]  # fmt: skip
    leases = set()
    for same in spellings:
        found = {parse_address(one).lease(DEFAULT_TABLE) for one in same}
        monkeypatch.setattr("socket.gethostname", lambda: "elsewhere")
        found |= {parse_address(one).lease(DEFAULT_TABLE) for one in same}
        assert len(found) == 1, same
        leases |= found
    assert len(leases) == len(spellings)
    monkeypatch.setenv("PGHOST", "db")
    assert parse_address("postgresql:///shop").lease(DEFAULT_TABLE) in leases


def test_a_setting_that_is_refused_is_told_without_passwords(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = "postgresql://u:hunter2@h/d"
    wrong: list[dict[str, Any]] = [
        {"outbox": [address, 5]},
        {"broker": [address]},
        {"outbox": {"a": address}},
    ]
    for settings in wrong:
        with pytest.raises(BadSetting) as raised:
            App("a", directory=tmp_path, **settings)
        assert "hunter2" not in str(raised.value)
    monkeypatch.setenv("UMBEL_OUTBOX", f'["{address}", ')
    with pytest.raises(BadSetting, match=r"not JSON") as raised:
        App("a", directory=tmp_path)
    assert "hunter2" not in str(raised.value)


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://u:p%zzhunter2@h/db",
        "postgresql://u:p%00hunter2@h/db",
        "postgresql://u:p@hunter2@h/db",
        "postgresql://u:hunter2@[::1]x/db",
        "postgresql://u:hunter2@[::1/db",
        "postgresql://h/d?password=p=hunter2",
        "postgresql://h/d?passwort=1&password=hunter2",
        "postgresql://u:hunter2@h\u2100/db",
        "host=h password=hunter2",
    ],
)
def test_an_address_that_cannot_be_read_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(BadURL) as raised:
        need_driver(parse_address(url))
    assert "hunter2" not in str(raised.value) and raised.value.__cause__ is None


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
