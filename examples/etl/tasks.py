"""Load a part of a CSV file into a table, and report how far it is."""

import csv
import sqlite3
from collections.abc import Mapping
from contextlib import closing
from itertools import islice
from pathlib import Path

from umbel import App, Task

app = App("etl")

WAREHOUSE = Path(__file__).parent / "warehouse.db"
BATCH_ROWS = 250
LOCK_WAIT_S = 30.0  # parts run side by side, and SQLite has one writer at a time
Reading = tuple[int, str, float]


@app.task(bind=True)
def load_part(self: Task[..., int], path: str, first: int, count: int) -> int:
    """Load `count` rows from row `first` on and return how many of them could be used.

    Rows are keyed by their number: after a crash the part runs again and replaces what it wrote.
    """
    loaded = 0
    with (
        closing(sqlite3.connect(WAREHOUSE, timeout=LOCK_WAIT_S)) as warehouse,
        open(path, newline="") as file,
    ):
        rows = islice(csv.DictReader(file), first, first + count)
        for done in range(0, count, BATCH_ROWS):
            batch = islice(rows, BATCH_ROWS)
            readings = [one for row in batch if (one := clean(row)) is not None]
            with warehouse:  # a transaction for each batch
                warehouse.executemany("INSERT OR REPLACE INTO readings VALUES (?, ?, ?)", readings)
            loaded += len(readings)
            self.progress(min(done + BATCH_ROWS, count), count)
    return loaded


def clean(row: Mapping[str, str]) -> Reading | None:
    """Fahrenheit to Celsius; None for a row without a temperature."""
    try:
        celsius = (float(row["fahrenheit"]) - 32.0) / 1.8
    except ValueError:
        return None
    return int(row["number"]), row["station"].strip().lower(), round(celsius, 2)


def create_table() -> None:
    with closing(sqlite3.connect(WAREHOUSE)) as warehouse, warehouse:
        warehouse.execute("PRAGMA journal_mode = WAL")
        warehouse.execute(
            "CREATE TABLE IF NOT EXISTS readings (number INTEGER PRIMARY KEY, station TEXT, celsius REAL)"
        )
