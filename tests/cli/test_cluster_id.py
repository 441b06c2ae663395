"""`umbel cluster-id`: made once, restored when it was lost, and never made by anything else."""

import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from tests.cli.running import Umbel
from umbel.cli import exits

TASKS = """
from umbel import App

app = App("shop", broker="sqlite:///{broker}", signing_keys=["k:{secret}"])

@app.task(name="shop.pay")
def pay(amount):
    pass
"""


@pytest.fixture
def url(tmp_path: Path) -> str:
    """Of the broker of an app that has keys."""
    (tmp_path / "tasks.py").write_text(TASKS.format(broker=tmp_path / "shop.db", secret="s" * 32))
    return f"sqlite:///{tmp_path}/shop.db"


def lose(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "shop.db")) as database, database:
        database.execute("DELETE FROM meta WHERE name LIKE 'cluster%'")


def test_nothing_is_signed_before_somebody_makes_an_id(umbel: Umbel, url: str) -> None:
    ran = umbel("call", "shop.pay", "--args", "[1]")
    assert ran.code == exits.USAGE
    assert "umbel cluster-id make" in ran.err and "umbel cluster-id restore ID" in ran.err
    assert umbel("cluster-id", "show").code == exits.NOT_FOUND
    assert "FAIL" in next(line for line in umbel("doctor").out.splitlines() if "cluster id" in line)
    assert umbel("cluster-id", "make", "shop-eu").out == "shop-eu\n"
    assert umbel("call", "shop.pay", "--args", "[1]").code == exits.OK
    assert "shop-eu" in next(line for line in umbel("doctor").out.splitlines() if "cluster id" in line)


def test_there_is_one_id_and_it_is_not_made_again(umbel: Umbel, url: str) -> None:
    made = umbel("cluster-id", "make", "-b", url)
    assert (made.code, len(made.out.strip())) == (exits.OK, 16)
    known = made.out.strip()
    again = umbel("cluster-id", "make", "other")
    assert again.code == exits.FAILED and f"has the cluster id '{known}' already" in again.err
    restored = umbel("cluster-id", "restore", "other")
    assert restored.code == exits.FAILED and f"another cluster id, '{known}'" in restored.err
    assert umbel("cluster-id", "restore", known).out == f"{known}\n"
    shown = json.loads(umbel("cluster-id", "show", "--json").out)
    assert shown["id"] == known and shown["since"] > 1_000_000_000
    assert umbel("cluster-id", "show").out.startswith(f"{known}, made ")


def test_one_that_was_lost_is_restored_and_what_0_3_signs_is_refused_from_then_on(
    umbel: Umbel, url: str, tmp_path: Path
) -> None:
    umbel("cluster-id", "make", "shop-eu")
    lose(tmp_path)
    assert umbel("call", "shop.pay", "--args", "[1]").code == exits.USAGE
    assert umbel("cluster-id", "show").code == exits.NOT_FOUND  # nobody has made another meanwhile
    assert umbel("cluster-id", "restore", "shop-eu").code == exits.OK
    assert json.loads(umbel("cluster-id", "show", "--json").out) == {"id": "shop-eu", "since": None}
    assert umbel("call", "shop.pay", "--args", "[1]").code == exits.OK


@pytest.mark.parametrize("name", ["a/b", "ä", "x" * 65])
def test_an_id_that_cannot_be_used_is_refused_by_name(umbel: Umbel, url: str, name: str) -> None:
    for verb in ("make", "restore"):
        ran = umbel("cluster-id", verb, name)
        assert ran.code == exits.USAGE and "must be 1 to 64 letters" in ran.err
