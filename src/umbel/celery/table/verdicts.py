"""Verdicts: what becomes of one thing that a Celery project uses when Umbel runs its worker."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Verdict(StrEnum):
    WORKS = "works"
    DIFFERS = "differs"
    NO_EFFECT = "no effect"
    NOT_SUPPORTED = "not supported"


@dataclass(frozen=True, slots=True)
class Judged:
    """`note`: how it works here, why it has no effect, or what to do instead.

    `refused`: a worker does not start with it, because tasks would be lost or run wrongly.
    """

    verdict: Verdict
    note: str = ""
    refused: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """One setting of Celery's. `ours`: the setting of Umbel's that it becomes, by `read` from the app.

    `judge`: the verdict for a value, where some values have another one than the setting itself.
    """

    name: str
    judged: Judged
    ours: str = ""
    read: Callable[[Any], Any] | None = None
    judge: Callable[[Any], Judged | None] | None = None

    def value(self, app: Any) -> Any:
        """The value of `ours`; None: leave it at its default."""
        return app.conf[self.name] if self.read is None else self.read(app)

    def verdict_on(self, value: Any) -> Judged:
        return (self.judge(value) if self.judge else None) or self.judged


CLIENT = "read by clients, which go on using Celery"
LIBRARY = "Celery's own code reads it, in clients and child processes"


def works(
    name: str,
    note: str = "",
    *,
    ours: str = "",
    read: Callable[[Any], Any] | None = None,
    judge: Callable[[Any], Judged | None] | None = None,
) -> Row:
    shown = "; ".join(part for part in (f"becomes `{ours}`" if ours else "", note) if part)
    return Row(name, Judged(Verdict.WORKS, shown or LIBRARY), ours, read, judge)


def client(name: str, more: str = "") -> Row:
    return Row(name, Judged(Verdict.WORKS, f"{CLIENT}; {more}" if more else CLIENT))


def differs(
    name: str, how: str, *, ours: str = "", read: Callable[[Any], Any] | None = None, judge: Any = None
) -> Row:
    shown = f"becomes `{ours}`; {how}" if ours else how
    return Row(name, Judged(Verdict.DIFFERS, shown), ours, read, judge)


def idle(name: str, why: str) -> Row:
    return Row(name, Judged(Verdict.NO_EFFECT, why))


def unsupported(name: str, remedy: str, *, refused: bool = True) -> Row:
    return Row(name, Judged(Verdict.NOT_SUPPORTED, remedy, refused))


def refusal(remedy: str) -> Judged:
    return Judged(Verdict.NOT_SUPPORTED, remedy, refused=True)


def each(prefix: str, names: str, row: Callable[[str], Row]) -> Iterable[Row]:
    return [row(f"{prefix}_{name}") for name in names.split()]
