"""Trees: typed values as plain containers, and back by their types.

    Order(7, {Path("a")}, due)  <->  {"number": 7, "files": ["a"], "due": due}

A tree is what a serializer is given: maps, lists and plain values, and those that JSON tags (`typed.py`);
for msgpack, which has no tags, those are text: the reader knows the type.
Both ways are msgspec's compiled ones. Where it knows no way to write a value, `json_lowering.py` does,
which says what every value looks like.
"""

from collections.abc import Callable, Mapping
from pathlib import PurePath
from typing import Any

import msgspec

from umbel.wire.json_lowering import PYDANTIC_FORM, Lowering, Path
from umbel.wire.limits import DEFAULT_LIMITS
from umbel.wire.typed import TAGGED_TYPES, as_text

Maker = Callable[[type[Any], Any], Any]
"""Makes a value of a type that msgspec does not know; TypeError or ValueError: of this it cannot."""


def to_tree(values: Mapping[str, Any], *, tags: bool = True) -> dict[str, Any]:
    """The values by name as trees; BadValue names the one that cannot be sent, and where in it.

    `tags`: the serializer tags what it does not know by itself.
    """
    tree: dict[str, Any]
    kept = _TAGGED if tags else _BYTES
    try:
        tree = msgspec.to_builtins(values, builtin_types=kept, str_keys=True, enc_hook=_lowered)
    except (TypeError, ValueError, RecursionError):
        # A key of its own kind, a subclass of a plain type: rare, and not msgspec's.
        lowering, depth = _Keeping("JSON", False, DEFAULT_LIMITS, kept), DEFAULT_LIMITS.depth_max
        return {name: lowering.lower(value, (None, name), depth) for name, value in values.items()}
    return tree


def from_tree(tree: Mapping[str, Any], kind: type[msgspec.Struct], make: Maker) -> Any:
    """The Struct whose fields the tree holds; `msgspec.ValidationError` says what does not fit."""
    return msgspec.convert(tree, kind, str_keys=True, builtin_types=_BYTES, dec_hook=make)


class _Keeping(Lowering, frozen=True):
    """Leaves to the serializer what it tags or writes by itself."""

    kept: tuple[type, ...]

    def _tag(self, value: object, path: Path, levels: int) -> Any:
        if isinstance(value, self.kept):
            return value
        text = as_text(value)
        return super()._tag(value, path, levels) if text is None else text

    def _whole_number(self, value: int, path: Path) -> int:
        return int.__int__(value)


_TAGGED = tuple(TAGGED_TYPES)
_BYTES = (bytes,)  # they arrive as such: text is not taken for base64


def _lowered(value: Any) -> Any:
    if isinstance(value, PurePath):
        return str(value)
    if (serializer := getattr(type(value), "__pydantic_serializer__", None)) is not None:
        return serializer.to_python(value, **PYDANTIC_FORM)
    raise TypeError(
        f"a {type(value).__name__} cannot be sent as JSON; convert it, to text or a dict for example"
    )
