"""Typed arguments and results: from our client through a Celery worker to one of ours, and back."""

import datetime
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.interop import typed_tasks as types
from tests.interop.mixed_cluster import MixedCluster, Raised
from tests.wire.strategies import text
from umbel import App

EXAMPLES = 200 if os.environ.get("UMBEL_SOAK") else 6
WAIT_S = 60.0

words = text.filter(lambda word: "\0" not in word)
zones = st.none() | st.integers(-23 * 60, 23 * 60).map(
    lambda minutes: datetime.timezone(datetime.timedelta(minutes=minutes))
)
moments = st.datetimes(timezones=zones)
paths = words.map(Path)
prices = st.decimals(allow_nan=False)
lines = st.builds(types.Line, words, prices, st.none() | moments)
boxes = st.builds(
    types.Box, st.integers(-(2**53), 2**53), st.lists(lines, max_size=3), st.dictionaries(words, st.dates())
)
people = st.builds(types.Person, name=words, born=st.dates(), nicknames=st.sets(words), home=paths)
everything = st.builds(
    types.Everything,
    line=lines,
    box=boxes,
    person=people,
    colour=st.sampled_from(types.Colour),
    level=st.sampled_from(types.Level),
    key=st.uuids(),
    path=paths,
    at=moments,
    day=st.dates(),
    took=st.timedeltas(),
    price=prices,
    raw=st.binary(max_size=20),
    pair=st.tuples(st.integers(0, 2**60), words),
    names=st.lists(words, max_size=3).map(tuple),
    tags=st.sets(words, max_size=3),
    days=st.dictionaries(st.dates(), st.integers(0, 9), max_size=3),
    size=st.sampled_from(["s", "m", 3]),
    maybe=st.none() | st.uuids(),
    lines=st.none() | st.lists(lines, max_size=2),
    count=st.integers(0, 2**60),
)


@pytest.fixture(scope="module")
def app(cluster: MixedCluster) -> Iterator[App]:
    made = App("interop", broker=cluster.broker, backend=cluster.backend)
    yield made
    made.close()


@pytest.mark.parametrize("serializer", ["json", "msgpack"])
def test_every_type_survives_both_libraries(app: App, serializer: str) -> None:
    known, pass_on = types.register(app)

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        phases=[Phase.explicit, Phase.reuse, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(everything)
    def passes(value: Any) -> None:
        options = {"queue": "on_celery", "serializer": serializer}
        sent = pass_on.apply_async((value, "on_umbel", serializer), **options)
        assert known.AsyncResult(sent.get(timeout=WAIT_S)).get(timeout=WAIT_S) == value

    passes()


def test_what_celery_sends_and_does_not_fit_is_a_failure_that_names_it(cluster: MixedCluster) -> None:
    wrong = "app.send_task('shared_tasks.everything', kwargs={'colour': 'green'}, queue='on_umbel')"
    with pytest.raises(Raised, match=r"argument 'colour' of shared_tasks\.everything is 'green'") as caught:
        cluster.client("celery")(f"get({wrong})")
    assert (caught.value.kind, caught.value.module) == ("TypeError", "builtins")
