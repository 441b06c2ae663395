"""Forms: write a table from what earlier ones with the same names had in common.

Of the thirty headers of a task three or four differ from one message to the next. What was the same in all so
far is kept as bytes; a value that differs for the first time is written for itself from then on. What a form
writes is what `table.encode_table` writes.
"""

from itertools import compress
from typing import Any

import msgspec

from umbel.brokers.amqp.table import Table, encode_short, encode_table, encode_value

FORMS_MAX = 100
BYTES_MAX = 4096  # of a table that a form is made from
_forms: dict[tuple[str, ...], "Form"] = {}


class Form(msgspec.Struct, frozen=True):
    """Which values are the same in all tables with these names. Their kinds are too: 1 equals True."""

    is_same: tuple[bool, ...]
    is_other: tuple[bool, ...]
    values: tuple[Any, ...]
    kinds: tuple[type, ...]
    opening: bytes  # with the name of the first that differs
    runs: tuple[bytes, ...]  # after each that differs

    def encode(self, values: tuple[Any, ...]) -> bytes | None:
        """None: one differs that was the same until now."""
        same = tuple(compress(values, self.is_same))
        if same != self.values or tuple(map(type, same)) != self.kinds:
            return None
        parts = [self.opening]
        for value, run in zip(compress(values, self.is_other), self.runs, strict=True):
            parts += (encode_value(value), run)
        data = b"".join(parts)
        return len(data).to_bytes(4) + data


def encode_alike(table: Table) -> bytes:
    names, values = tuple(table), tuple(table.values())
    form = _forms.get(names)
    if form is not None and (encoded := form.encode(values)) is not None:
        return encoded
    encoded = encode_table(table)
    if len(encoded) <= BYTES_MAX:
        if len(_forms) >= FORMS_MAX:
            _forms.clear()
        _forms[names] = _form(names, values, form)
    return encoded


def _form(names: tuple[str, ...], values: tuple[Any, ...], before: Form | None) -> Form:
    is_same = tuple(map(_may_be_compared, values))
    if before is not None:
        known = iter(zip(before.values, before.kinds, strict=True))
        is_same = tuple(
            was_same and (value, type(value)) == next(known)
            for was_same, value in zip(before.is_same, values, strict=True)
        )
    runs = [b""]
    for name, value, is_constant in zip(names, values, is_same, strict=True):
        runs[-1] += encode_short(name)
        if is_constant:
            runs[-1] += encode_value(value)
        else:
            runs.append(b"")
    same = tuple(compress(values, is_same))
    kinds = tuple(map(type, same))
    return Form(is_same, tuple(not one for one in is_same), same, kinds, runs[0], tuple(runs[1:]))


def _may_be_compared(value: Any) -> bool:
    """Equal values are the same bytes: not so for 0.0 and -0.0, nor for what may be inside of a list."""
    if isinstance(value, list):
        return all(one is None for one in value)
    return value is None or value == {} or isinstance(value, str | int)
