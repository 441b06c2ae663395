"""Split a CSV file into parts, have them loaded side by side, and show how far all of them are."""

import csv
import sqlite3
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from random import Random

from tasks import WAREHOUSE, app, create_table, load_part
from umbel import AsyncResult

FILE = Path(__file__).parent / "readings.csv"
ROWS, PART_ROWS = 20_000, 2_500
LOOK_EVERY_S = 0.1


def write_readings() -> None:
    """What a weather service might deliver: the same every time, one row in a hundred without a value."""
    chance = Random("readings")
    with FILE.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["number", "station", "fahrenheit"])
        for number in range(ROWS):
            value = "" if number % 100 == 99 else f"{chance.gauss(60, 15):.1f}"
            rows.writerow([number, chance.choice(["Graz", "Linz", " Wien "]), value])


def rows_done(part: AsyncResult[int]) -> int:
    match part.info:
        case None:  # it waits
            return 0
        case {"done": int(done)}:  # what it reported last
            return done
        case _:  # it has ended: this is its result, or its exception
            return PART_ROWS


def watch(parts: Sequence[AsyncResult[int]]) -> None:
    while (done := sum(map(rows_done, parts))) < ROWS:
        print(f"\r{done / ROWS:4.0%} {'#' * (40 * done // ROWS):<40}", end="", file=sys.stderr, flush=True)
        time.sleep(LOOK_EVERY_S)
    print(f"\r{'':<45}\r", end="", file=sys.stderr)


def main() -> None:
    write_readings()
    create_table()
    calls = [load_part.s(str(FILE), first, PART_ROWS) for first in range(0, ROWS, PART_ROWS)]
    parts = app.send_many(calls)
    watch(parts)
    loaded = sum(part.get(timeout=60) for part in parts)
    print(f"{loaded} of {ROWS} rows loaded in {len(parts)} parts")
    with closing(sqlite3.connect(WAREHOUSE)) as warehouse:
        for station, mean in warehouse.execute("SELECT station, avg(celsius) FROM readings GROUP BY station"):
            print(f"{station} {mean:.1f} °C")
    app.close()


if __name__ == "__main__":
    main()
