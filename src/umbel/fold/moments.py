"""Moments: instants that events carry as text, as microseconds since 1970.

ISO 8601 as senders write it, and the shorter forms that Spark's cast accepts: a date alone, one digit
for two, any number of decimals, of which six count. A text without an offset is UTC. What Spark
would read by a zone's name, by today's date, or beyond the year 9999, is no moment here.
"""

import re
from datetime import UTC, datetime, timedelta

import numpy as np
import pyarrow as pa

from umbel.fold.columns import Flags, Ints

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_OFFSET_MAX_S = 18 * 3600
_FORM = re.compile(
    r"\s*(?P<year>\d{4})(?:-(?P<month>\d{1,2})(?:-(?P<day>\d{1,2})"
    r"(?:[ T](?P<hour>\d{1,2})(?::(?P<minute>\d{1,2})"
    r"(?::(?P<second>\d{1,2})(?:\.(?P<decimals>\d*))?"
    r"\s*(?:Z|(?:UTC|GMT|UT)?(?:(?P<sign>[+-])(?P<hours>\d{1,2})(?::?(?P<minutes>\d{1,2}))?)?)?)?)?)?)?)?\s*",
    re.ASCII,
)


def moments(texts: pa.Array) -> tuple[Ints, Flags]:
    """Microseconds, and which of the texts are moments."""
    if texts.null_count == len(texts):
        return np.zeros(len(texts), dtype=np.int64), np.zeros(len(texts), dtype=bool)
    encoded = texts.dictionary_encode()
    read = [moment(text) for text in encoded.dictionary.to_pylist()]
    micros = np.array([*(0 if one is None else one for one in read), 0], dtype=np.int64)
    known = np.array([*(one is not None for one in read), False])
    places = encoded.indices.fill_null(len(read)).to_numpy(zero_copy_only=False)
    return micros[places], known[places]


def moment(text: str) -> int | None:
    found = _FORM.fullmatch(text)
    if found is None:
        return None
    year, month, day = (int(found[name] or 1) for name in ("year", "month", "day"))
    hour, minute, second = (int(found[name] or 0) for name in ("hour", "minute", "second"))
    micros = int((found["decimals"] or "")[:6].ljust(6, "0"))
    ahead_s = int(found["hours"] or 0) * 3600 + int(found["minutes"] or 0) * 60
    if ahead_s > _OFFSET_MAX_S or int(found["minutes"] or 0) > 59:
        return None
    try:
        local = datetime(year, month, day, hour, minute, second, micros, UTC)
    except ValueError:
        return None
    ahead_us = ahead_s * 1_000_000 * (-1 if found["sign"] == "-" else 1)
    return (local - _EPOCH) // _MICROSECOND - ahead_us
