"""Export: the rows of a query as CSV, Parquet and JSON have them."""

import csv
import io
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from math import isfinite
from typing import Any

from umbel.history.arrow import arrow, parquet
from umbel.history.query import Answer

CALCULATED = ("=", "+", "-", "@", "\t", "\r")


def plain(value: Any) -> Any:
    """A value of DuckDB as JSON has it."""

    match value:
        case datetime():
            at = value.astimezone(UTC) if value.tzinfo else value.replace(tzinfo=UTC)
            return at.isoformat(timespec="auto").replace("+00:00", "Z")
        case date():
            return value.isoformat()
        case timedelta():
            return value.total_seconds()
        case Decimal():
            return float(value)
        case float():
            return value if isfinite(value) else str(value)
        case bytes():
            return value.hex()
        case list() | tuple():
            return [plain(one) for one in value]
        case dict():
            return {str(key): plain(one) for key, one in value.items()}
        case None | bool() | int() | str():
            return value
        case _:
            return str(value)


def as_csv(answer: Answer) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(answer.columns)
    writer.writerows([["" if value is None else plain(value) for value in row] for row in answer.rows])
    return text.getvalue()


def for_spreadsheets(answer: Answer) -> Answer:
    """With an apostrophe before each text that a spreadsheet would calculate or run."""
    rows = [tuple(map(_guarded, row)) for row in answer.rows]
    return replace(answer, columns=tuple(map(_guarded, answer.columns)), rows=rows)


def _guarded(value: Any) -> Any:
    return f"'{value}" if isinstance(value, str) and value.startswith(CALCULATED) else value


def as_parquet(answer: Answer) -> bytes:
    """Columns of two names get numbers behind them: a file has each name once."""
    names = [
        name if name not in answer.columns[:place] else f"{name}_{place}"
        for place, name in enumerate(answer.columns)
    ]
    columns = list(zip(*answer.rows, strict=True)) or [()] * len(names)
    table = arrow().table({name: list(column) for name, column in zip(names, columns, strict=True)})
    written = io.BytesIO()
    parquet().write_table(table, written)
    return written.getvalue()
