import datetime
import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given

from tests.wire import examples, strategies
from umbel.errors import BadMessage, BadValue, TaskRevoked, TooLarge, WireError, WorkerLost
from umbel.protocol.delivery.states import FAILURE, READY_STATES, RETRY, REVOKED, STARTED, SUCCESS
from umbel.wire.message import StoredResult, parse_instant
from umbel.wire.result import (
    ResultMap,
    decode_result,
    encode_failure,
    encode_state,
    encode_success,
    exception_map,
)


def pairs(payload: bytes) -> list[tuple[str, Any]]:
    return list(json.loads(payload).items())


# ---- the captured results (wire 6.1) ---------------------------------------------------------------


def test_a_success_is_written_as_captured() -> None:
    done_at = parse_instant("2026-11-15T00:38:49.083986+00:00")
    stored = encode_success(examples.TASK_ID, 5, done_at=done_at)
    assert (stored.task_id, stored.status) == (examples.TASK_ID, SUCCESS)
    assert pairs(stored.payload) == pairs(examples.SUCCESS)


def test_a_failure_is_written_as_captured() -> None:
    done_at = parse_instant("2026-11-15T00:38:49.191999+00:00")
    task_id = "555870ea-cba5-4fd9-9151-1a5cebe822fa"
    stored = encode_failure(task_id, exception_map(ValueError("boom")), "Traceback …", done_at=done_at)
    assert stored.status == FAILURE
    assert pairs(stored.payload) == pairs(examples.FAILURE)


def test_a_start_is_written_as_captured() -> None:
    task_id = "5cce4339-1ab5-4a64-b109-bee1e9bab181"
    stored = encode_state(task_id, STARTED, {"pid": 30758, "hostname": "w1@vm"})
    assert stored.status == STARTED
    assert pairs(stored.payload) == pairs(examples.STARTED)


@pytest.mark.parametrize("payload", [examples.SUCCESS, examples.FAILURE, examples.STARTED])
def test_the_captured_results_are_read(payload: bytes) -> None:
    read, captured = decode_result(payload), json.loads(payload)
    assert {name: getattr(read, name) for name in captured} == captured
    assert (read.group_id, read.parent_id) == (None, None)


def test_a_revoked_task_has_no_traceback_and_a_reason() -> None:
    stored = encode_failure("1", exception_map(TaskRevoked("expired")), None, status=REVOKED, done_at=1.0)
    read = decode_result(stored.payload)
    assert read.status == REVOKED
    assert read.status in READY_STATES
    assert read.traceback is None
    assert read.result["exc_message"] == ["expired"]


def test_a_retry_is_not_done() -> None:
    stored = encode_failure("1", exception_map(OSError(5)), "Traceback", status=RETRY, done_at=None)
    assert decode_result(stored.payload).date_done is None
    assert stored.status not in READY_STATES


# ---- the parts of a result -------------------------------------------------------------------------


@given(strategies.values)
@strategies.quick
def test_a_return_value_arrives_as_it_was(value: object) -> None:
    read = decode_result(encode_success("1", value, done_at=0.0).payload)
    assert read == ResultMap("SUCCESS", "1", value, None, [], "1970-01-01T00:00:00.000000+00:00")


def test_children_family_and_extras_are_written_where_celery_reads_them() -> None:
    stored = encode_success(
        "1",
        None,
        done_at=0.0,
        children=["a", ("b", "1")],
        group_id="g",
        parent_id="p",
        extended={"name": "t", "args": [datetime.date(2026, 1, 2)], "retries": 0},
    )
    found = json.loads(stored.payload)
    assert found["children"] == [[["a", None], None], [["b", "1"], None]]
    assert (found["group_id"], found["parent_id"], found["name"], found["retries"]) == ("g", "p", "t", 0)
    assert found["args"] == [{"__type__": "date", "__value__": "2026-01-02"}]
    assert decode_result(stored.payload).group_id == "g"


def test_a_return_value_that_cannot_be_sent_is_named() -> None:
    with pytest.raises(BadValue, match=r"^result\['x'\]: json cannot send a <class 'object'>"):
        encode_success("1", {"x": object()}, done_at=0.0)


def test_a_return_value_is_never_too_deep_for_the_reader() -> None:
    value: list[Any] = []
    for _ in range(62):
        value = [value]
    assert decode_result(encode_success("1", value, done_at=0.0).payload).result == value
    with pytest.raises(TooLarge, match="result is nested deeper"):
        encode_success("1", [value], done_at=0.0)


def test_a_traceback_with_broken_file_names_is_stored() -> None:
    stored = encode_failure("1", exception_map(OSError("x")), 'File "\udcff.py" é', done_at=0.0)
    assert decode_result(stored.payload).traceback == 'File "\\udcff.py" é'


# ---- exceptions ------------------------------------------------------------------------------------


class Odd(Exception):
    args = "not the arguments"  # type: ignore[assignment]

    class Inner(Exception):
        pass


class Broken:
    def __repr__(self) -> str:
        raise ZeroDivisionError


def test_an_exception_is_named_by_its_qualified_class() -> None:
    assert exception_map(Odd.Inner("x", 1)) == {
        "exc_type": "Odd.Inner",
        "exc_message": ["x", 1],
        "exc_module": __name__,
    }


def test_errors_that_celery_has_too_carry_its_names() -> None:
    assert exception_map(TaskRevoked("expired")) == {
        "exc_type": "TaskRevokedError",
        "exc_message": ["expired"],
        "exc_module": "celery.exceptions",
    }
    assert exception_map(WorkerLost("killed"))["exc_module"] == "billiard.exceptions"


def test_an_exception_may_call_something_else_args() -> None:
    assert exception_map(Odd(7))["exc_message"] == [7]


@pytest.mark.parametrize(
    ("arg", "stored"),
    [
        (datetime.date(2026, 1, 2), datetime.date(2026, 1, 2)),
        ({1}, [1]),
        (ValueError("inner"), "ValueError('inner')"),
        (float("nan"), "nan"),
        ("\ud800", "\\ud800"),
        ([10**5000], "[<int that has no repr>]"),
        (Broken(), "<Broken that has no repr>"),
        ({"__type__": 1, "__value__": 2}, "{'__type__': 1, '__value__': 2}"),
    ],
)
def test_every_exception_can_be_stored(arg: object, stored: object) -> None:
    result = encode_failure("1", exception_map(ValueError(arg)), None, done_at=0.0)
    assert decode_result(result.payload).result["exc_message"] == [stored]


def test_an_exception_nested_to_the_limit_can_be_stored() -> None:
    for depth in range(50, 70):
        value: list[Any] = []
        for _ in range(depth):
            value = [value]
        result = encode_failure("1", exception_map(ValueError(value)), None, done_at=0.0)
        assert decode_result(result.payload).status == FAILURE


def test_an_exception_with_a_large_argument_is_cut() -> None:
    described = exception_map(ValueError("x" * 5_000_000))
    assert len(described["exc_message"][0]) < 1100


# ---- bytes from elsewhere --------------------------------------------------------------------------


@given(strategies.any_bytes)
@strategies.quick
def test_any_bytes_are_a_result_or_refused(payload: bytes) -> None:
    with suppress(WireError):
        decode_result(payload)


@pytest.mark.parametrize("payload", [b"5", b"{}", b'{"status": 5, "task_id": "1"}', b'{"status": "SUCCESS"}'])
def test_what_is_no_result_is_refused(payload: bytes) -> None:
    with pytest.raises(BadMessage, match="the result cannot be decoded"):
        decode_result(payload)


def test_results_of_older_celery_have_no_date() -> None:  # wire 6.1, 6.3
    assert decode_result(b'{"status": "SUCCESS", "result": 1, "task_id": "1"}').date_done is None


def test_a_stored_result_names_its_task_outside_the_payload_too() -> None:
    stored = encode_success("1", 2, done_at=0.0)
    assert StoredResult("1", "SUCCESS", stored.payload) == stored
