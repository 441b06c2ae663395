"""Matching of names against globs and regular expressions, in time linear in both.

Patterns come from outside: a control request selects its workers by a pattern, and anyone who can write to
the broker can send one. Python's `re`, and `fnmatch` on top of it, backtrack, which can take years for a
pattern of twenty characters. So `re` never gets a pattern from outside (`tests/test_tidy.py` checks this),
and only the length of a pattern needs a limit.

A glob is matched in all its states at once, which are the bits of one number: bit n is set while the first n
parts of the pattern match what was read. Regular expressions use RE2 (`google-re2`, an optional library): no
backreferences, no lookaround, and memory limited by EXPRESSION_MAX_BYTES.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

EXPRESSION_MAX_BYTES = 64 * 1024
CACHED_MAX = 64
MISSING_RE2 = (
    "regular expressions need google-re2, which is not installed; "
    "run: pip install 'umbel[regex]', or use a glob"
)

Fits = Callable[[str], bool]


class BadPattern(ValueError):
    """A pattern cannot be used; the text says why."""


class Glob:
    """A shell pattern with the syntax of `fnmatch.fnmatchcase`: `*`, `?`, `[abc]`, `[a-z]`, `[!a]`."""

    __slots__ = ("_any", "_bounds", "_classes", "_last", "_literals", "_loops")

    def __init__(self, pattern: str) -> None:
        self._loops = 0  # states of a `*`, which every character preserves
        self._any = 0  # the states that every character advances; below, those that some characters advance
        self._literals: dict[str, int] = {}
        changes: dict[int, int] = {0: 0}  # by code point: the states whose class begins or ends there
        state = 1
        for part in _parts(pattern):
            if part == "*":
                self._loops |= state
                continue
            if part == "?":
                self._any |= state
            elif len(part) == 1:
                self._literals[part] = self._literals.get(part, 0) | state
            else:
                for bound in _bounds_of(part):
                    changes[bound] = changes.get(bound, 0) ^ state
            state <<= 1
        self._last = state
        self._bounds = sorted(changes)
        self._classes = list(_running(changes[bound] for bound in self._bounds))

    def fits(self, text: str) -> bool:
        """Return whether the whole text matches."""
        states = 1
        for character in text:
            leads = self._any | self._literals.get(character, 0)
            leads |= self._classes[bisect_right(self._bounds, ord(character)) - 1]
            states = (states & leads) << 1 | states & self._loops
            if not states:
                return False
        return bool(states & self._last)


@lru_cache(CACHED_MAX)
def glob_of(pattern: str) -> Glob:
    """Return the compiled pattern; it is cached."""
    return Glob(pattern)


def fits_glob(text: str, pattern: str) -> bool:
    """Return whether the text matches the glob; the match is case-sensitive."""
    return glob_of(pattern).fits(text)


def expression_of(pattern: str) -> Fits:
    """Compile a regular expression that must match at the beginning of a text, as with `re.match`.

    Raises BadPattern if RE2 does not accept the pattern, or is not installed.
    """
    try:
        import re2
    except ImportError:
        raise BadPattern(MISSING_RE2) from None
    options = re2.Options()
    options.max_mem, options.log_errors, options.never_capture = EXPRESSION_MAX_BYTES, False, True
    try:
        compiled = re2.compile(pattern, options=options)
    except (re2.error, UnicodeEncodeError) as error:
        raise BadPattern(f"the pattern is not a valid regular expression: {_reason_of(error)}") from None
    return lambda text: compiled.match(text.encode(errors="replace").decode()) is not None


def _reason_of(error: Any) -> str:
    reason = error.args[0] if isinstance(error, Exception) and error.args else error
    return reason.decode(errors="replace") if isinstance(reason, bytes) else str(error)


def _parts(pattern: str) -> Iterator[str]:
    """Yield the pattern's parts: a wildcard, another character, or a class as `[` and its content."""
    at = 0
    while at < len(pattern):
        part, at = pattern[at], at + 1
        if part == "[":
            first = at + (pattern[at : at + 1] == "!")
            end = pattern.find("]", first + 1)  # a `]` that comes first belongs to the class
            if end >= 0:
                part, at = pattern[at - 1 : end], end + 1
        yield part


def _bounds_of(part: str) -> Iterator[int]:
    """Yield the code points where the character class of a part begins and ends."""
    negated = part.startswith("[!")
    members, at = part[2 if negated else 1 :], 0
    ranges: list[tuple[int, int]] = []
    while at < len(members):
        is_range = members[at + 1 : at + 2] == "-" and at + 2 < len(members)
        ranges.append((ord(members[at]), ord(members[at + 2 if is_range else at])))
        at += 3 if is_range else 1
    if negated:
        yield 0
    end = -1
    for low, high in sorted(ranges):  # join overlapping ranges, otherwise they would cancel out
        if high > end and high >= low:
            yield max(low, end + 1)
            yield high + 1
            end = high


def _running(changes: Iterator[int]) -> Iterator[int]:
    states = 0
    for change in changes:
        states ^= change
        yield states
