import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.wire import strategies
from umbel.errors import BadMessage, BadValue
from umbel.wire.message import format_instant, parse_instant

SENT = 1794703131.100558
EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)


@pytest.mark.parametrize(
    ("text", "unix_s"),
    [
        ("2026-11-15T00:38:51.100558+00:00", SENT),
        ("2026-11-14T19:38:51.100558-05:00", SENT),
        ("2026-11-15T00:38:51.100558Z", SENT),
        ("2026-11-15T00:38:51.100558", SENT),  # nothing means UTC
        ("2026-11-15T00:38:51", 1794703131.0),
    ],
)
def test_the_captured_forms_are_read(text: str, unix_s: float) -> None:  # wire 1.6
    assert parse_instant(text) == unix_s


def test_an_instant_is_written_as_captured() -> None:
    assert format_instant(SENT) == "2026-11-15T00:38:51.100558+00:00"
    assert format_instant(0) == "1970-01-01T00:00:00.000000+00:00"


@given(st.timedeltas(min_value=datetime.timedelta(), max_value=datetime.timedelta(days=80_000)))
@strategies.quick
def test_an_instant_is_kept_to_the_microsecond(since_1970: datetime.timedelta) -> None:
    moment, unix_s = EPOCH + since_1970, since_1970.total_seconds()
    assert format_instant(unix_s) == moment.isoformat(timespec="microseconds")
    assert parse_instant(format_instant(unix_s)) == unix_s


@given(st.datetimes(timezones=strategies.zones))
@strategies.quick
def test_every_iso_time_is_an_instant(moment: datetime.datetime) -> None:
    aware = moment if moment.tzinfo else moment.replace(tzinfo=datetime.UTC)
    assert parse_instant(moment.isoformat()) == aware.timestamp()


@pytest.mark.parametrize("text", ["", "tomorrow", "2026-13-01", "1794703131", "2026-11-15T25:00:00", None, 5])
def test_other_text_is_refused_and_shown(text: str) -> None:
    with pytest.raises(BadMessage, match=f"{text!r} is not an ISO 8601 time"):
        parse_instant(text)


@pytest.mark.parametrize("unix_s", [float("nan"), float("inf"), 1e18, -1e18])
def test_a_time_without_a_date_is_refused(unix_s: float) -> None:
    with pytest.raises(BadValue, match="not a time between"):
        format_instant(unix_s)
