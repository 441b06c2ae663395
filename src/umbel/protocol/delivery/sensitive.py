"""Sensitive arguments: which arguments of a task must not be shown, and how they are removed from texts.

There are two mechanisms, because a value can leak in two ways. Where arguments are shown (headers, events,
`inspect`, extended results), the sensitive ones are replaced before a text is made of them. Where a text
comes from the task (tracebacks, messages of exceptions, reprs of results), the values of the call are
searched for and masked, even if the text was truncated and contains only the beginning of a value.

Limits: values that the task derives from an argument are not recognized, such as a hash, a part or an
upper-case form. Texts with fewer than `SHORTEST` characters and numbers with fewer digits are not searched
for, because they occur everywhere.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from umbel.protocol.machine import Value

MASK = "***"
SHORTEST = 3
PREFIX = 16  # the beginning of a longer secret is masked too
LEAVES_MAX = 1000  # values inside a sensitive argument; with more, the whole text is masked
DEPTH_MAX = 16


Hides = Callable[[str | None], bool]  # whether the task of that name has sensitive arguments


def hides_nothing(_name: str | None) -> bool:
    """Return False: no task has sensitive arguments."""
    return False


def is_open(args: str | None, kwargs: str | None) -> bool:
    """Return whether the texts contain arguments, none of them masked.

    Umbel's clients and workers mask sensitive arguments before they make a text of a call. Celery's do not.
    """
    return bool(args or kwargs) and MASK not in (args or "") and MASK not in (kwargs or "")


class Hidden:
    """Replaces a sensitive value when arguments are shown."""

    __slots__ = ()

    def __repr__(self) -> str:
        return MASK


HIDDEN = Hidden()


class Sensitive(Value):
    """The sensitive parameters of a task, by name and position.

    `rest_from` is the position where a sensitive `*args` begins.
    """

    names: frozenset[str]
    positions: frozenset[int] = frozenset()
    rest_from: int | None = None
    # for a sensitive `**kwargs`: every name except these is sensitive
    other_names: frozenset[str] | None = None

    def hide(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], mask: Any = HIDDEN
    ) -> tuple[list[Any], dict[str, Any]]:
        """Return the arguments with each sensitive one replaced by a mask."""
        return (
            [mask if self._at(place) else value for place, value in enumerate(args)],
            {name: mask if self._named(name) else value for name, value in kwargs.items()},
        )

    def values(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """Return the sensitive values among the arguments."""
        return [value for place, value in enumerate(args) if self._at(place)] + [
            value for name, value in kwargs.items() if self._named(name)
        ]

    def _at(self, place: int) -> bool:
        return place in self.positions or (self.rest_from is not None and place >= self.rest_from)

    def _named(self, name: str) -> bool:
        return name in self.names or (self.other_names is not None and name not in self.other_names)


class Secrets:
    """The texts to mask, made from the sensitive arguments of one call."""

    def __init__(self, values: Iterable[Any]) -> None:
        found: set[str] = set()
        self._too_many = False
        for count, leaf in enumerate(_leaves(values, 0)):
            if count >= LEAVES_MAX or leaf is None:
                self._too_many = True
                break
            found |= _forms(leaf)
        # The longest first, because a text may be part of another.
        self._texts = sorted(found, key=lambda text: (-len(text), text))

    def __bool__(self) -> bool:
        return self._too_many or bool(self._texts)

    @property
    def is_everything(self) -> bool:
        """Return whether there are too many values to search for, so that whole texts are masked."""
        return self._too_many

    def strike(self, text: str) -> str:
        """Return the text with each secret masked."""
        if self._too_many:
            return MASK
        for secret in self._texts:
            text = _struck(text, secret)
        return text

    def strike_all(self, value: Any, depth: int = 0) -> Any:
        """Return plain data with each secret masked; values nested too deep are masked completely."""
        if depth > DEPTH_MAX:
            return MASK
        match value:
            case str():
                return self.strike(value)
            case dict():
                return {
                    self.strike_all(name): self.strike_all(item, depth + 1) for name, item in value.items()
                }
            case list() | tuple():
                return [self.strike_all(item, depth + 1) for item in value]
            case bool() | None:
                return value
            case _:
                text = str(value)
                return value if self.strike(text) == text else MASK


def _leaves(values: Iterable[Any], depth: int) -> Iterator[Any]:
    """Yield texts, bytes and numbers at any depth; None for a value that is nested too deep."""
    for value in values:
        match value:
            case str() | bytes() | int() | float():
                yield value
            case Mapping():
                yield from (
                    _leaves([*value.keys(), *value.values()], depth + 1) if depth < DEPTH_MAX else [None]
                )
            case list() | tuple() | set() | frozenset():
                yield from _leaves(value, depth + 1) if depth < DEPTH_MAX else [None]
            case None:
                continue
            case _:
                yield str(value)


def _forms(leaf: Any) -> set[str]:
    """Return the forms in which a value may occur in a text: plain, in a repr, in JSON."""
    if isinstance(leaf, bool):
        return set()
    if isinstance(leaf, int | float):
        text = str(leaf)
        return {text} if len(text) > SHORTEST else set()
    if isinstance(leaf, bytes):
        plain = leaf.decode("utf-8", "backslashreplace")
        forms = {plain, repr(leaf)[2:-1]}
    else:
        quoted = repr(leaf)[1:-1]
        forms = {leaf, quoted, ascii(leaf)[1:-1], _in_json(leaf), leaf.strip()}
        forms |= {quoted.replace("'", "\\'"), quoted.replace("\\'", "'")}
    return {form for form in forms if len(form) >= SHORTEST}


def _in_json(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return escaped.replace("\n", "\\n").replace("\r", "\\r").replace("\t", "\\t")


def _struck(text: str, secret: str) -> str:
    beginning = secret[:PREFIX]
    parts: list[str] = []
    start = 0
    while (found := text.find(beginning, start)) >= 0:
        end = found + len(beginning)
        while end < len(text) and end - found < len(secret) and text[end] == secret[end - found]:
            end += 1
        parts += (text[start:found], MASK)
        start = end
    return "".join([*parts, text[start:]]) if parts else text
