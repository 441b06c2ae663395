"""The lake's columns follow the vocabulary, and a row holds its event whole (D1)."""

from typing import Any

import pytest

from umbel.events.merge import eid
from umbel.events.tables import COLUMNS, row
from umbel.events.types import VOCABULARY, Event
from umbel.events.view import EventReader


def test_every_field_of_every_type_has_one_column() -> None:
    names = [column.name for column in COLUMNS]
    assert len(names) == len(set(names))
    assert {name for fields in VOCABULARY.values() for name in fields} <= set(names)


def test_a_row_holds_the_event_as_its_reader_settled_it() -> None:
    event = _read(
        type="task-succeeded", uuid="t", hostname="a@h", pid=7, clock=9, timestamp=1.5, result="3", odd=[1]
    )
    assert row(event, recorded_us=2_000_000, source="log") == {
        "digest": eid(event),
        "type": "task-succeeded",
        "slot": "succeeded",
        "uuid": "t",
        "hostname": "a@h",
        "pid": 7,
        "clock": 9,
        "timestamp": 1_500_000,
        "result": "3",
        "extra": '{"odd":[1]}',
        "recorded_at": 2_000_000,
        "source": "log",
    }


def test_an_event_of_a_users_own_type_keeps_its_name() -> None:
    found = row(_read(type="task-progress", uuid="t", done=3), recorded_us=0, source="log")
    assert (found["type"], found["slot"], found["extra"]) == ("task-progress", "custom", '{"done":3}')


@pytest.mark.parametrize("signum", [9, "SIGKILL"])
def test_what_may_be_of_several_types_is_json(signum: int | str) -> None:
    found = row(_read(type="task-revoked", uuid="t", signum=signum), recorded_us=0, source="log")
    assert found["signum"] in {"9", '"SIGKILL"'}


def test_an_election_id_is_not_the_digest() -> None:
    event = _read(type="worker-elected", hostname="a@h", eid="e1")
    found = row(event, recorded_us=0, source="log")
    assert (found["eid"], found["digest"]) == ("e1", eid(event))


def _read(**fields: Any) -> Event:
    event = EventReader().read(fields)
    assert event is not None
    return event
