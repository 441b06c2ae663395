"""Stamps: headers that every message of a canvas carries."""

from typing import Any

import pytest

from umbel import App, Signature, StampingVisitor, Task, chain, chord, group

app = App("stamping", broker="sqlite:////nowhere/stamping.db")
seen: list[dict[str, Any]] = []


@app.task(bind=True)
def look(self: Task[..., Any], *_: Any) -> dict[str, Any]:
    seen.append(self.request.stamps)
    return self.request.stamps


@pytest.fixture(autouse=True)
def _forget() -> None:
    seen.clear()


def stamps_of(signature: Signature[Any]) -> list[dict[str, Any]]:
    with app.eager():
        signature.delay().get()
    return seen


def test_stamps_are_headers_of_the_message() -> None:
    signature = look.s()
    assert signature.stamp(job=5, tags=["a", "b"]) is signature
    assert stamps_of(signature) == [{"job": 5, "tags": ["a", "b"]}]


@pytest.mark.parametrize(
    ("composed", "stamped"),
    [
        (lambda: chain(look.s(), look.s()), [True, True]),
        (lambda: group(look.s(), look.s()), [True, True]),
        (lambda: chord([look.s(), look.s()], look.s()), [True, True, False]),  # as Celery has it
        (lambda: chain(look.s(), group(look.s(), look.s())), [True, True, True]),
    ],
)
def test_all_parts_are_stamped(composed: Any, stamped: list[bool]) -> None:
    assert stamps_of(composed().stamp(job=5)) == [{"job": 5} if one else {} for one in stamped]


def test_callbacks_are_stamped_too() -> None:
    signature = look.s()
    signature.link(look.s())
    assert stamps_of(signature.stamp(job=5)) == [{"job": 5}, {"job": 5}]


def test_a_second_stamp_wins_or_is_added() -> None:
    assert look.s().stamp(job=1).stamp(job=2).options["job"] == 2  # type: ignore[typeddict-item]
    both = look.s().stamp(job=1, other=3).stamp(append_stamps=True, job=2)
    assert stamps_of(both) == [{"job": [2, 1], "other": 3}]


class Places(StampingVisitor):
    """Says what each part is, and notes what it was asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def on_signature(self, sig: Any, **headers: Any) -> dict[str, Any]:
        self.asked.append("signature")
        return {"place": len(self.asked)}

    def on_group_start(self, group: Any, **headers: Any) -> dict[str, Any]:
        self.asked.append("group")
        return {"within": "group"}

    def on_chain_start(self, chain: Any, **headers: Any) -> dict[str, Any]:
        self.asked.append("chain")
        return {"kept": 2}

    def on_chord_body(self, sig: Any, **headers: Any) -> dict[str, Any]:
        self.asked.append("body")
        return {"body": True}

    def on_callback(self, callback: Any, **headers: Any) -> dict[str, Any]:
        self.asked.append("callback")
        return {"called_back": True}

    def on_errback(self, errback: Any, **headers: Any) -> dict[str, Any]:
        self.asked.append("errback")
        return {"errs": True}


def test_a_visitor_says_the_stamps_of_each_part() -> None:
    visitor = Places()
    whole = chain(look.s(), chord([look.s()], look.s()))
    assert stamps_of(whole.stamp(visitor, job=5)) == [
        {"job": 5, "kept": 2, "place": 2},
        {"job": 5, "kept": 2, "within": "group", "place": 4},
        {"job": 5, "kept": 2, "within": "group", "body": True, "place": 6},
    ]
    assert visitor.asked == ["chain", "signature", "group", "signature", "body", "signature"]


def test_a_visitor_is_asked_about_callbacks_and_errbacks() -> None:
    visitor, signature = Places(), look.s()
    signature.link(look.s())
    signature.link_error(look.s().to_map())  # type: ignore[arg-type]
    signature.stamp(visitor)
    assert visitor.asked == ["callback", "signature", "errback", "signature", "signature"]
    (errback,) = signature.to_map()["options"]["link_error"]
    assert errback["options"]["errs"] is True
