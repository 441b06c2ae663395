import pytest

from tests.wire import examples
from umbel.errors import BadMessage
from umbel.wire.steps import check_signature


@pytest.mark.parametrize("signature", [examples.CHORD_SIGNATURE, *examples.CHAIN_EMBED["chain"]])
def test_the_captured_signatures_are_as_they_should_be(signature: object) -> None:  # wire 1.8
    assert check_signature(signature) == signature


def test_keys_left_out_are_filled_in_and_unknown_ones_kept() -> None:
    assert check_signature({"task": "t", "options": None, "new": 1}) == {
        "task": "t",
        "args": [],
        "kwargs": {},
        "options": {},
        "subtask_type": None,
        "immutable": False,
        "new": 1,
    }


def test_two_signatures_share_nothing() -> None:
    first, second = check_signature({"task": "t"}), check_signature({"task": "t"})
    first["kwargs"]["x"] = 1
    first["args"].append(1)
    assert (second["args"], second["kwargs"]) == ([], {})


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (None, "a signature must be a map, not None"),
        ([], r"a signature must be a map, not \[\]"),
        ({}, "a signature must name its task, not None"),
        ({"task": ""}, "a signature must name its task, not ''"),
        ({"task": "t", "args": "ab"}, "the signature of 't': args is 'ab'; it must be a list"),
        ({"task": "t", "kwargs": []}, r"the signature of 't': kwargs is \[\]; it must be a map"),
        ({"task": "t", "kwargs": {1: 2}}, "every key of its kwargs must be text"),
        ({"task": "t", "options": 5}, "the signature of 't': options is 5; it must be a map"),
        ({"task": "t", "subtask_type": 5}, "the signature of 't': subtask_type is 5; it must be text"),
        (
            {"task": "t", "immutable": "no"},
            "the signature of 't': immutable is 'no'; it must be true or false",
        ),
    ],
)
def test_what_is_no_signature_is_refused(value: object, problem: str) -> None:
    with pytest.raises(BadMessage, match=problem):
        check_signature(value)
