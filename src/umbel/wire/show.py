"""Show: arguments and results as short text, for headers, events and logs.

A short text is Python's repr. Longer text is truncated at `TEXT_MAX`, nesting at `LEVELS_MAX`, and only the
displayed part of a value is visited. If a value's repr raises, its type is shown instead: text for display
must never stop a task.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from types import NoneType
from typing import TypeVar

from umbel.text import leaving

# ---- foreign ---------------------------------------------------------------------------------------
#
# Only this function of the wire format runs user code. `repr()` of a user's value, and everything that pickle
# does, call methods of other classes, which may raise anything. All such calls use `attempt`, so that no
# other code of this package needs to catch every exception.

ArgumentT = TypeVar("ArgumentT")
AnswerT = TypeVar("AnswerT")


def attempt(
    call: Callable[[ArgumentT], AnswerT], argument: ArgumentT, otherwise: Callable[[Exception], AnswerT]
) -> AnswerT:
    """Call a function with this argument; if it raises, return what `otherwise` returns for the error."""
    try:
        return call(argument)
    except Exception as error:  # of the repr of a user's value
        return otherwise(error)


# ---- show ------------------------------------------------------------------------------------------

TEXT_MAX = 1024
LEVELS_MAX = 3
CUT = "..."
BRIEF_MAX = 100

# Up to these sizes a single repr() shows the call.
SMALL_ITEMS = 16
SMALL_TEXT = 200


def show_args(args: Sequence[object], text_max: int = TEXT_MAX) -> str:
    """Return positional arguments as text, for headers and events."""
    return _show(tuple(args) if len(args) <= text_max else tuple(args[:text_max]), args, text_max)


def show_kwargs(kwargs: Mapping[str, object], text_max: int = TEXT_MAX) -> str:
    """Return keyword arguments as text, for headers and events."""
    return _show(dict(kwargs), kwargs.values(), text_max) if kwargs else "{}"


def show_value(value: object, text_max: int = TEXT_MAX) -> str:
    """Return a value as text, at most about `text_max` characters."""
    return _show(value, (value,), text_max)


def cut(text: str, text_max: int) -> str:
    """Return the text, or its first `text_max` characters and an ellipsis."""
    return text if len(text) <= text_max else text[:text_max] + CUT


def brief(value: object) -> str:
    """Return a short text of a value, for an error message about it."""
    return _shown_carefully(value, BRIEF_MAX)


def _show(value: object, items: Collection[object], text_max: int) -> str:
    if _are_small(items):
        try:
            text = repr(value)
        except ValueError:  # a number too long to convert; the fallback names its type
            text = ""
        if 0 < len(text) <= text_max:
            return text
    return _shown_carefully(value, text_max)


def _shown_carefully(value: object, text_max: int) -> str:
    # Even a plain container can raise, if another thread changes it at the same time.
    return attempt(
        lambda value: _joined(_pieces(value, 1, text_max), text_max), value, lambda _: _type_of(value)
    )


def _are_small(items: Collection[object]) -> bool:
    if len(items) > SMALL_ITEMS:
        return False
    for item in items:
        if type(item) is str:
            if len(item) > SMALL_TEXT:
                return False
        elif type(item) not in _NUMBERS:
            return False
    return True


def _joined(pieces: Iterable[str], text_max: int) -> str:
    text = ""
    for piece in pieces:
        text += piece
        if len(text) > text_max:
            return text[:text_max] + CUT
    return text


def _pieces(value: object, level: int, text_max: int) -> Iterator[str]:
    """Yield the text of a value piece by piece, so that the caller can stop when it has enough."""
    match value:
        case str() | bytes() if type(value) is str or type(value) is bytes:
            yield repr(value) if len(value) <= text_max else repr(value[:text_max]) + CUT
        case dict() if type(value) is dict:
            yield from _container_pieces("{", "}", _pairs(value, level, text_max), level, empty=not value)
        case list() if type(value) is list:
            yield from _container_pieces("[", "]", _items(value, level, text_max), level, empty=not value)
        case tuple() if type(value) is tuple:
            end = ",)" if len(value) == 1 else ")"
            yield from _container_pieces("(", end, _items(value, level, text_max), level, empty=not value)
        case set() if type(value) is set and value:
            yield from _container_pieces("{", "}", _items(value, level, text_max), level, empty=False)
        case frozenset() if type(value) is frozenset and value:
            yield from _container_pieces(
                "frozenset({", "})", _items(value, level, text_max), level, empty=False
            )
        case _:
            yield _own_repr(value)


def _container_pieces(
    start: str, end: str, items: Iterator[Iterator[str]], level: int, *, empty: bool
) -> Iterator[str]:
    yield start
    if level > LEVELS_MAX and not empty:
        yield CUT
    elif not empty:
        yield from next(items)
        for item in items:
            yield ", "
            yield from item
    yield end


def _items(values: Iterable[object], level: int, text_max: int) -> Iterator[Iterator[str]]:
    return (_pieces(value, level + 1, text_max) for value in values)


def _pairs(values: Mapping[object, object], level: int, text_max: int) -> Iterator[Iterator[str]]:
    return (_pair(key, value, level, text_max) for key, value in values.items())


def _pair(key: object, value: object, level: int, text_max: int) -> Iterator[str]:
    yield from _pieces(key, level + 1, text_max)
    yield ": "
    yield from _pieces(value, level + 1, text_max)


def _own_repr(value: object) -> str:
    return leaving(attempt(_repr, value, lambda _: _type_of(value)))


def _type_of(value: object) -> str:
    return f"<{type(value).__name__} that has no repr>"


_repr: Callable[[object], str] = repr
_NUMBERS = frozenset({int, float, bool, NoneType})
