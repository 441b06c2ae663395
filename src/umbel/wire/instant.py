"""Instants: points in time as ISO 8601 text, the form of `eta`, `expires` and `date_done`.

Celery reads text without an offset in the receiver's configured zone. We read it as UTC
everywhere: a cluster whose nodes disagree about the zone would otherwise run a task at different
times on different nodes. A naive time sent by a Celery client set to another zone is therefore
off by that zone; aware times, Celery's default, are always right.
"""

from datetime import UTC, datetime

from umbel.errors import BadMessage, BadValue
from umbel.wire.show import brief

EARLIEST_S = datetime(1, 1, 1, tzinfo=UTC).timestamp()
LATEST_S = datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC).timestamp()


def parse_instant(text: str) -> float:
    """Return Unix seconds. An offset, `Z`, or nothing, which means UTC."""
    try:
        moment = datetime.fromisoformat(text)
    except (ValueError, TypeError) as error:
        raise BadMessage(f"{brief(text)} is not an ISO 8601 time") from error
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    unix_s = moment.timestamp()
    if not EARLIEST_S <= unix_s <= LATEST_S + 1:  # its offset leads out of what dates can say
        raise BadMessage(f"{brief(text)} is not a time between the years 1 and 9999")
    return min(unix_s, LATEST_S)  # `datetime.max`, which some mean by "never", rounds up to the year 10000


def format_instant(unix_s: float) -> str:
    """Write Unix seconds the way Celery does: microseconds, explicit offset."""
    try:
        return datetime.fromtimestamp(unix_s, UTC).isoformat(timespec="microseconds")
    except (ValueError, OverflowError, OSError) as error:
        raise BadValue(f"{unix_s!r} is not a time between the years 1 and 9999") from error
