"""A damaged file of the embedded broker: every call works, or says in one line which file and what to do."""

import asyncio
import os
import random
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from tests.brokers.test_sqlite_malformed import Use, filled
from tests.brokers.under_test import outgoing
from umbel.brokers.interface import BrokerSettings
from umbel.brokers.sqlite.store import Store
from umbel.errors import AccessRefused, BrokerError, RowsSetAside

__all__ = ["filled"]  # a fixture

SOAK = bool(os.environ.get("UMBEL_SOAK"))
PAGE = 4096


def overwrite_header(data: bytearray, chance: random.Random) -> None:
    for _ in range(chance.randint(1, 20)):
        data[chance.randrange(100)] = chance.randrange(256)


def overwrite_bytes(data: bytearray, chance: random.Random) -> None:
    for _ in range(chance.randint(1, 50)):
        data[chance.randrange(len(data))] = chance.randrange(256)


def overwrite_page(data: bytearray, chance: random.Random) -> None:
    first = PAGE * chance.randrange(len(data) // PAGE)
    data[first : first + PAGE] = chance.randbytes(PAGE)


def overwrite_begin_of_page(data: bytearray, chance: random.Random) -> None:
    first = PAGE * chance.randrange(len(data) // PAGE)
    for _ in range(chance.randint(1, 10)):
        data[first + chance.randrange(200)] = chance.randrange(256)


def cut(data: bytearray, chance: random.Random) -> None:
    del data[chance.randrange(len(data)) :]


@pytest.mark.parametrize(
    "damage", [overwrite_header, overwrite_bytes, overwrite_page, overwrite_begin_of_page, cut]
)
def test_each_call_on_a_damaged_file_works_or_says_what_is_wrong(
    damage: Callable[[bytearray, random.Random], None], filled: Path, tmp_path: Path
) -> None:
    whole = filled.read_bytes()
    for seed in range(400 if SOAK else 15):
        data = bytearray(whole)
        damage(data, random.Random(seed))
        path = tmp_path / f"{seed}.db"
        path.write_bytes(data)
        for error in asyncio.run(Use(path).each()):
            assert isinstance(error, BrokerError), (damage.__name__, seed, error)
            assert "\n" not in str(error)
            assert str(path) in str(error) or not isinstance(error, AccessRefused)


def test_a_log_that_was_cut_is_named_and_not_taken_for_a_full_disk(tmp_path: Path) -> None:
    errors: list[BrokerError] = []
    for seed in range(100):
        chance, path = random.Random(seed), tmp_path / f"{seed}.db"
        settings = BrokerSettings(f"sqlite:///{path}", connect_timeout_s=0.3)
        stores = [Store(settings), Store(settings)]
        stores[0].publish(outgoing(*(str(number) * 300 for number in range(50))))
        for store in stores[: chance.randint(1, 2)]:
            store.publish(outgoing("a"))
        log = Path(f"{path}-wal")
        os.truncate(log, chance.randrange(log.stat().st_size))
        for store in stores:
            errors += refusals(store)
            store.close()
    assert {type(error) for error in errors} <= {AccessRefused, RowsSetAside}
    assert any("its log" in str(error) and "-wal" in str(error) for error in errors)
    refused = [str(error) for error in errors if isinstance(error, AccessRefused)]
    assert all(".recover" in text and "restore a backup" in text for text in refused)


def refusals(store: Store) -> Iterator[BrokerError]:
    calls = (store.depths, partial(store.publish, outgoing("a")), partial(store.peek, "celery", 9))
    for call in calls:
        try:
            call()
        except BrokerError as error:
            yield error


def test_what_another_program_can_read_of_a_damaged_file_is_a_broker_again(
    filled: Path, tmp_path: Path
) -> None:
    """The steps in docs/operating.md, for an sqlite3 without a `.recover` that works."""
    if shutil.which("sqlite3") is None:
        pytest.skip("the sqlite3 command is not installed")
    damaged, recovered = tmp_path / "damaged.db", tmp_path / "recovered.db"
    data = bytearray(filled.read_bytes())
    with closing(sqlite3.connect(filled)) as db:
        (page,) = db.execute("SELECT rootpage FROM sqlite_master WHERE name = 'results_by_expiry'").fetchone()
    data[PAGE * (page - 1) : PAGE * page] = random.Random(1).randbytes(PAGE)
    damaged.write_bytes(data)
    page_of_docs = Path(__file__).parents[2] / "docs" / "operating.md"
    (steps,) = [
        block.partition("```")[0]
        for block in page_of_docs.read_text().split("```sh\n")
        if ".dump" in block.partition("```")[0]
    ]
    steps = steps.replace("umbel.db", str(damaged)).replace("recovered.db", str(recovered))
    assert os.system(steps) == 0
    store = Store(BrokerSettings(f"sqlite:///{recovered}"))
    assert store.depths()["celery"].ready >= 1
    store.publish(outgoing("a"))
    store.close()
