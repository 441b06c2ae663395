"""Spelling: values and names as SQL writes them, where a parameter cannot stand."""

from collections.abc import Sequence


def text_literal(value: str) -> str:
    return "'" + value.replace("'", "''") + "'"


def quoted_name(value: str) -> str:
    return '"' + value.replace('"', '""') + '"'


def percentiles(column: str, name: str, percents: Sequence[int], *, where: str = "") -> str:
    """Exact ones, by a name with `{}` for the percent. All of a column come from one list: each call of the
    function with another share would keep all values once more."""
    shares = [percent / 100 for percent in percents]
    listed = f"quantile_cont({column}, {shares})" + (f" filter ({where})" if where else "")
    return ", ".join(
        f"({listed})[{place}] as {name.format(percent)}" for place, percent in enumerate(percents, 1)
    )
