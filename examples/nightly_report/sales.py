"""Fill the table of sales with a week that is the same every time, its last day being 2026-03-07."""

import sqlite3
from contextlib import closing
from datetime import date, timedelta
from random import Random

from tasks import SALES

LAST_DAY = date(2026, 3, 7)
DAYS, SALES_A_DAY = 7, 200
PRICES_CENTS = {"apple": 40, "bread": 390, "cheese": 720, "milk": 155}


def main() -> None:
    chance = Random("sales")
    rows = [
        ((LAST_DAY - timedelta(days=back)).isoformat(), product, chance.randint(1, 5), PRICES_CENTS[product])
        for back in range(DAYS)
        for product in chance.choices(sorted(PRICES_CENTS), k=SALES_A_DAY)
    ]
    with closing(sqlite3.connect(SALES)) as sales, sales:
        sales.execute("DROP TABLE IF EXISTS sales")
        sales.execute("CREATE TABLE sales (day TEXT, product TEXT, amount INTEGER, price_cents INTEGER)")
        sales.executemany("INSERT INTO sales VALUES (?, ?, ?, ?)", rows)
    print(f"{len(rows)} sales")


if __name__ == "__main__":
    main()
