"""Text is any text: what leaves a process can be encoded, what people see does nothing to their terminal."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from umbel.text import leaving, lines, numbered, one_line

any_text = st.text(st.characters(exclude_categories=[]), max_size=40)


class Named(str):
    """Text of a user's own class."""

    __slots__ = ()


@given(any_text)
def test_whatever_leaves_can_be_encoded_and_the_rest_is_as_it_was(text: str) -> None:
    left = leaving(text)
    assert type(left) is str
    left.encode()
    assert leaving(left) == left
    assert (left == text) == (not any("\ud800" <= one <= "\udfff" for one in text))


@given(any_text)
def test_whatever_is_shown_is_printed_in_one_line(text: str) -> None:
    shown = one_line(text)
    assert shown.isprintable()
    assert (shown == text) == text.isprintable()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain äöü 漢字 🎉", "plain äöü 漢字 🎉"),
        ("\x1b[2J", "\\x1b[2J"),
        ("one\r\ntwo\0", "one\\r\\ntwo\\x00"),
        ("\u202eabc\u2066", "\\u202eabc\\u2066"),
        ("\u2028\x85", "\\u2028\\x85"),
        (os.fsdecode(b"\xff"), "\\udcff"),
    ],
)
def test_what_a_terminal_would_obey_is_escaped(text: str, shown: str) -> None:
    assert one_line(text) == shown
    leaving(text).encode()


def test_the_lines_of_a_traceback_stay() -> None:
    assert lines("Traceback:\n  at \x1b[2J\r\nError") == "Traceback:\n  at \\x1b[2J\nError"


def test_text_of_another_class_leaves_as_plain_text() -> None:
    assert type(leaving(Named("abc"))) is str


@pytest.mark.parametrize(("count", "shown"), [(0, "0 tasks"), (1, "1 task"), (2000, "2,000 tasks")])
def test_one_is_no_plural(count: int, shown: str) -> None:
    assert numbered(count, "task") == shown
