"""Patterns from outside: what fits them, and that matching takes steps in proportion to their length."""

import json
import re
import subprocess
import sys
from fnmatch import fnmatchcase

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from umbel.patterns import BadPattern, Glob, expression_of, fits_glob

SIGNS = "aabbcz*?[]!-^\\&|~.@\n"
# fnmatch drops a range that runs backwards, and then takes a `!` behind it for a negation, which it is not.
MISREAD = re.compile(r"\[!?[^\]]-.!|\[(?:[^\]]-.)+!", re.DOTALL)


@given(st.text(SIGNS, max_size=12), st.text("abcz!-^\\&]@\n[*?", max_size=8))
@example("a[!b-d]*", "aexyz")
@example("[]-a]*", "]")
@example("[!]]", "]")
@example("[z-a]", "b")
@example("[!z-a]", "b")
@example("[--0]", ".")
@example("[a-ca-c]", "b")
@example("[", "[")
@example("*" * 50 + "b", "a" * 50)
def test_a_glob_fits_what_fnmatch_says(pattern: str, text: str) -> None:
    if not MISREAD.search(pattern):
        assert fits_glob(text, pattern) is fnmatchcase(text, pattern)


@given(
    st.lists(st.sampled_from(["*", "a", "?", "[ab]", "[!b]", "[a-z]", "ab"]), max_size=12),
    st.text("ab", max_size=12),
)
def test_a_glob_of_wildcards_fits_what_fnmatch_says(parts: list[str], text: str) -> None:
    assert Glob("".join(parts)).fits(text) is fnmatchcase(text, "".join(parts))


HARD = ["*a" * 8 + "b", "[a-b]*" * 4, "?*a" * 5, "[!x-z]" * 4, "a*" * 8, "[abcdefgh]" * 2, "[" * 16]


# In an interpreter that nothing else uses: where a thread has an exception to come, tracing does not go on.
COUNT = """
import json, sys
from umbel import patterns

def lines_run(work):
    count = 0
    def trace(frame, event, _):
        nonlocal count
        if frame.f_code.co_filename != patterns.__file__:
            return None
        count += event == "line"
        return trace
    sys.settrace(trace)
    work()
    sys.settrace(None)
    return count

def steps(part, times):
    pattern, text = part * times, "a" * 25 * times
    return lines_run(lambda: patterns.Glob(pattern).fits(text)) / (len(pattern) + len(text))

print(json.dumps({part: [steps(part, 8), steps(part, 64)] for part in json.loads(sys.argv[1])}))
"""


def test_a_glob_takes_steps_in_proportion_to_its_length_and_the_texts() -> None:
    """Lines of code that run, for patterns of up to 1,088 characters and texts of 1,600."""
    command = [sys.executable, "-c", COUNT, json.dumps(HARD)]
    counted = json.loads(subprocess.check_output(command, text=True, timeout=60))
    assert set(counted) == set(HARD)
    for few, many in counted.values():
        assert few > 0 and many < 1.2 * few


@pytest.mark.parametrize(
    ("pattern", "text", "fits"),
    [
        (r"w\d+@(east|west)$", "w1@east", True),
        ("east", "w1@east", False),  # a match begins where the text does, as Celery has it
        ("w1", "w1@east", True),
        (r"(?i)W1@\w+", "w1@east", True),
        ("w.", "wé", True),
        ("(a+)+$", "a" * 200 + "!", False),
        ("(a?){30}a{30}", "a" * 30, True),
        (r"(\w*)*(\w*)*(\w*)*!", "a" * 200, False),
    ],
)
def test_a_regular_expression_fits_from_the_beginning_of_a_text(pattern: str, text: str, fits: bool) -> None:
    assert expression_of(pattern)(text) is fits


@pytest.mark.parametrize(
    ("pattern", "problem"),
    [
        ("(", "missing ): ("),
        ("(?x)(a+) +$", "invalid perl operator: (?x"),
        (r"(a)\1", r"invalid escape sequence: \1"),
        ("(?=a)", "invalid perl operator: (?="),
        ("a{0,900}" * 100, "pattern too large"),
        ("\ud800", "surrogates not allowed"),
    ],
)
def test_a_regular_expression_that_cannot_be_matched_is_refused_with_the_reason(
    pattern: str, problem: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(BadPattern) as refused:
        expression_of(pattern)
    assert capfd.readouterr().err == ""  # the library would log each
    assert "not a valid regular expression" in str(refused.value) and problem in str(refused.value)


def test_without_the_library_a_regular_expression_is_refused_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "re2", None)
    with pytest.raises(BadPattern, match=r"pip install 'umbel\[regex\]', or use a glob"):
        expression_of("w1")
    assert fits_glob("w1@east", "w1@*")
