"""Hypothesis strategies: values that the wire carries, and bytes that almost are messages."""

import datetime
import json
import os
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from tests.wire import examples

EXAMPLES = 150 if os.environ.get("UMBEL_SOAK") else 60
# A busy machine is slow for reasons that say nothing about the code.
quick = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow])

# Text that is Unicode: a lone surrogate is not.
text = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)

atoms = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(min_value=-(10**400), max_value=10**400)
    | st.floats(allow_nan=False, allow_infinity=False)
    | text
)

zones = st.none() | st.timedeltas(
    min_value=datetime.timedelta(hours=-23), max_value=datetime.timedelta(hours=23)
).map(lambda offset: datetime.timezone(datetime.timedelta(seconds=offset // datetime.timedelta(seconds=1))))

typed = (
    st.datetimes(timezones=zones)
    | st.dates()
    | st.times(timezones=zones)
    | st.decimals(allow_nan=False)
    | st.uuids()
    | st.binary(max_size=20)
)


def nested(leaves: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.recursive(
        leaves,
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(text, inner, max_size=4),
        max_leaves=12,
    )


plain_values = nested(atoms)
values = nested(atoms | typed)
msgpack_values = nested(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | text
    | st.binary(max_size=9)
)
kwargs = st.dictionaries(text, values, max_size=3)

# Anything at all, JSON of the wrong shape, and real messages with a few bytes changed.
_whole = [
    examples.HEADERS,
    examples.BODY,
    examples.TYPED,
    examples.V1_BODY,
    examples.EVENT_LIST,
    examples.FAILURE,
]


@st.composite
def _damaged(draw: st.DrawFn) -> bytes:
    data = bytearray(draw(st.sampled_from(_whole)))
    for _ in range(draw(st.integers(1, 4))):
        data[draw(st.integers(0, len(data) - 1))] = draw(st.integers(0, 255))
    return bytes(data[: draw(st.integers(1, len(data)))])


_TYPE_NAMES = ["datetime", "date", "time", "decimal", "uuid", "bytes", "base64", "set", "", 5, None]


def _as_json(value: object) -> bytes:
    return json.dumps(value).encode()


_json_like = nested(
    atoms
    | st.floats()
    | st.fixed_dictionaries({"__type__": st.sampled_from(_TYPE_NAMES), "__value__": nested(atoms)})
    | st.dictionaries(st.sampled_from(["task", "id", "args", "kwargs", "chord", "status"]), atoms)
).map(_as_json)

any_bytes = st.binary(max_size=80) | _damaged() | _json_like
