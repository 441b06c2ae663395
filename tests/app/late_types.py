"""Tasks whose annotations are text: some of the names in them come true late, one never."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from decimal import Decimal


def takes_early(order: Early) -> Early:
    return order


def takes_late(order: Late, note: str = "") -> Late:
    return order


def takes_unknown(price: Decimal) -> None: ...


def takes_plain(order: Plain) -> None: ...


def bound(self: Nobody, order: Late) -> Late:  # type: ignore[name-defined]  # noqa: F821 (nobody asks)
    return order


@dataclass
class Early:
    number: int


Plain = dict[str, Any]


def define_late() -> None:
    """Only now there is such a class."""

    @dataclass
    class Made:
        number: int

    globals()["Late"] = Made


@dataclass
class _Stand:
    number: int


if TYPE_CHECKING:
    Late = _Stand
