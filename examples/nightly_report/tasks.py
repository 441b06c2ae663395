"""A report of each day's sales, made every night, or for any day when somebody asks for it."""

import os
import sqlite3
from contextlib import closing
from datetime import date, datetime, timedelta
from pathlib import Path
from zoneinfo import ZoneInfo

from umbel import App

app = App("nightly_report")

HERE = Path(__file__).parent
SALES = HERE / "sales.db"
REPORTS = HERE / "reports"
SHOP_TIME = "Europe/Vienna"
TOTALS = """
    SELECT product, sum(amount), sum(amount * price_cents) FROM sales
    WHERE day = ? GROUP BY product ORDER BY 3 DESC, product
"""


@app.periodic(cron="30 2 * * *", tz=SHOP_TIME)
@app.task
def report_sales(day: str | None = None) -> str:
    """Write the report of a day (`2026-03-01`; yesterday if none is given) and return its path.

    A slot that passed while no worker was there is made up for (`catch_up="one"` is the default).
    A repeat replaces the file by the same one.
    """
    wanted = date.fromisoformat(day) if day else datetime.now(ZoneInfo(SHOP_TIME)).date() - timedelta(days=1)
    with closing(sqlite3.connect(SALES)) as sales:
        totals = sales.execute(TOTALS, [wanted.isoformat()]).fetchall()
    path = REPORTS / f"{wanted}.md"
    _write(path, _report(wanted, totals))
    return str(path.relative_to(HERE))


def _report(day: date, totals: list[tuple[str, int, int]]) -> str:
    rows = [f"| {product} | {amount} | {cents / 100:.2f} |" for product, amount, cents in totals]
    earned = sum(cents for _, _, cents in totals) / 100
    head = ["| product | sold | earned |", "|---|--:|--:|"]
    return "\n".join([f"# Sales of {day}", "", *head, *rows, "", f"Together {earned:.2f}", ""])


def _write(path: Path, text: str) -> None:
    """All of the file or nothing: a reader never sees half a report."""
    path.parent.mkdir(exist_ok=True)
    unfinished = path.with_suffix(f".{os.getpid()}.tmp")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(path)
