"""Values: Python values as bytes and back, by each serializer that a message may name.

JSON is the default, and the only serializer that is read without configuration, because it can carry only
data. Its text is the same as Celery's, with the typed maps of `typed.py`. Values of plain types only, as most
are, go straight to msgspec; other values are lowered first (`Lowering`).

Decoding raises only WireError, whatever the bytes are, and it raises before it exceeds `Limits`.

Two kinds of values are not supported: NaN and the infinities, which JSON does not have (Python's json writes
them as words that other readers refuse), and maps that look exactly like a typed value.
"""

import math
import re
from collections.abc import Callable, Collection
from itertools import chain
from types import NoneType
from typing import Any, TypeVar

import msgspec

from umbel.errors import BadMessage, BadValue
from umbel.wire.message import (
    DEFAULT_LIMITS,
    JSON_CONTENT,
    Limits,
    check_size,
    too_deep,
    too_large,
    too_long_a_number,
)
from umbel.wire.show import attempt
from umbel.wire.typed import TYPE_KEY, Lowering, is_short_enough, is_tagged, restore

__all__ = [
    "DEFAULT_LIMITS",
    "Limits",
    "SERIALIZERS",
    "Serializer",
    "UNREADABLE",
    "accepted_serializer",
    "are_atoms",
    "decode_json",
    "decode_json_as",
    "encode_json",
    "is_flat",
    "is_readable",
]

T = TypeVar("T")

UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""Errors that a decoder of msgspec raises for unreadable bytes."""


def encode_json(value: object, *, root: str = "value", limits: Limits = DEFAULT_LIMITS) -> bytes:
    """Encode a value; `root` is the beginning of the path in an error. Raises BadValue or TooLarge."""
    data = _encode_plain(value, limits) if _is_plain(value, limits.depth_max) else None
    if data is None:
        lowering = Lowering("json", tags=True, limits=limits)
        data = _to_json(lowering.lower(value, (None, root), limits.depth_max))
    if len(data) > limits.size_max_bytes:
        raise too_large(root, len(data), limits)
    return data


def decode_json(data: bytes, *, limits: Limits = DEFAULT_LIMITS) -> Any:
    """Decode JSON with limits and typed values. Raises WireError."""
    return decode_json_as(_ANY, data, limits=limits)


def decode_json_as(
    decoder: msgspec.json.Decoder[T], data: bytes, *, what: str = "JSON", limits: Limits = DEFAULT_LIMITS
) -> T:
    """Decode into the decoder's type, with the checks and typed values of `decode_json`.

    Small plain data is decoded directly into its type. Data with enough brackets to be too deep, or with a
    possible typed value, is first decoded to a tree, which is checked.
    """
    if len(data) > limits.size_max_bytes:
        raise too_large(what, len(data), limits)
    try:
        has_types, needs_check = _may_have_types(data), _needs_check(data, limits)
        if not (has_types or needs_check):
            return decoder.decode(data)
        tree = _ANY.decode(data)
        if needs_check:
            _check_tree(tree, what, limits)
        if has_types:
            tree = restore(tree, limits)
        return tree if decoder is _ANY else msgspec.convert(tree, decoder.type)
    except RecursionError as error:
        raise too_deep(what, limits) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        digits_max = limits.number_digits_max
        run = re.search(rb"-[0-9]{%d,}|[0-9]{%d,}" % (digits_max, digits_max + 1), data)
        if run and "out of range" in str(error):
            raise too_long_a_number(f"a number in {what}", len(run[0]), limits) from error
        raise BadMessage(f"{what} cannot be decoded: {error}; it begins {data[:60]!r}") from error


def _is_plain(value: object, levels: int) -> bool:
    """Return whether the value has only plain types, nested at most that many levels deep.

    It checks level by level, all items of a level by the set of their types, so that a large value costs a
    few passes of C code. Numbers that are too long and text that is not valid Unicode pass: the serializer
    refuses those.
    """
    if levels > 0 and is_flat(value):
        return True
    items = [value]
    for _ in range(levels + 1):
        kinds = set(map(type, items))
        if kinds <= _ATOMS:
            return True
        if not kinds <= _PLAIN:
            return False
        if float in kinds and not all(math.isfinite(item) for item in items if type(item) is float):
            return False
        containers = [item for item in items if type(item) not in _NOT_CONTAINERS]
        if not containers:
            return True
        if dict in kinds and not _have_plain_keys([item for item in containers if type(item) is dict]):
            return False
        items = _items_inside(containers)
    return False


def is_flat(value: object) -> bool:
    """Return whether this is a list or map of atoms, like the arguments of most calls."""
    if type(value) is list:
        return are_atoms(value)
    if type(value) is dict:
        return are_atoms(value.values()) and _TEXT_ONLY.issuperset(map(type, value)) and not is_tagged(value)
    return are_atoms((value,))


def are_atoms(items: Collection[object]) -> bool:
    """Return whether all items are text, finite numbers, bools or None."""
    kinds = set(map(type, items))
    if kinds <= _ATOMS:
        return True
    return kinds <= _NOT_CONTAINERS and all(math.isfinite(item) for item in items if type(item) is float)


def _items_inside(containers: list[Any]) -> list[Any]:
    """Return the items of lists and the values of maps, one level down, as one list."""
    lists = [item for item in containers if type(item) is not dict]
    maps = [item for item in containers if type(item) is dict]
    return [*chain.from_iterable(lists), *chain.from_iterable(map(dict.values, maps))]


def _have_plain_keys(maps: list[dict[Any, Any]]) -> bool:
    keys = set(chain.from_iterable(maps))
    if TYPE_KEY in keys and any(map(is_tagged, maps)):
        return False
    return set(map(type, keys)) <= _TEXT_ONLY


_ATOMS = frozenset({str, int, bool, NoneType})
_PLAIN = _ATOMS | {float, dict, list, tuple}
_NOT_CONTAINERS = _ATOMS | {float}
_TEXT_ONLY = frozenset({str})


class Serializer(msgspec.Struct, frozen=True):
    """A way to write and read a body: `encode(value, root)`, `decode(data, limits)`."""

    content_type: str
    content_encoding: str
    encode: Callable[[object, str], bytes]
    decode: Callable[[bytes, Limits], Any]


def accepted_serializer(content_type: str, accept: Collection[str]) -> Serializer:
    """Return the serializer of a message if the accept list has its name or type. Raises BadMessage."""
    for name, serializer in SERIALIZERS.items():
        if serializer.content_type == content_type:
            if name in accept or content_type in accept:
                return serializer
            raise BadMessage(
                f"content type {content_type!r} is not accepted here; "
                f"to accept it add {name!r} to the setting accept_content"
            )
    known = ", ".join(SERIALIZERS)
    raise BadMessage(f"content type {content_type!r} is unknown; accept_content can list {known}")


_CONTAINERS = frozenset({dict, list})
_ANY: msgspec.json.Decoder[Any] = msgspec.json.Decoder()
_to_json = msgspec.json.Encoder().encode
_MSGPACK: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder()
_to_msgpack = msgspec.msgpack.Encoder().encode


def _encode_plain(value: object, limits: Limits) -> bytes | None:
    """Encode, or return None if something is refused; lowering then finds out what and where."""
    if _restricts_numbers(limits):
        return None
    try:
        data = _to_json(value)
    except ValueError:  # a number too long, or text that is not valid Unicode
        return None
    return data if is_readable(data) else None


def is_readable(data: bytes) -> bool:
    """Return whether data written as JSON can be read again; a number with too many digits cannot.

    Python writes 4300 digits and a minus sign; msgspec counts the sign and reads one digit less.
    """
    if len(data) <= DEFAULT_LIMITS.number_digits_max or b"-" not in data:
        return True
    return _WRITTEN_BUT_NOT_READ.search(data) is None


_WRITTEN_BUT_NOT_READ = re.compile(rb"-[0-9]{4300}")

# Bodies of megabytes are searched before they are decoded. Searching for a single byte takes a thirtieth of
# the time of searching for several, or of counting.


def _may_have_types(data: bytes) -> bool:
    # The second form is an escape by which a sender might hide the same key.
    return (b"_" in data and b"__type__" in data) or (b"\\" in data and b"\\u00" in data)


def _needs_check(data: bytes, limits: Limits) -> bool:
    if limits is not DEFAULT_LIMITS and _restricts_numbers(limits):
        return True
    levels = limits.depth_max
    return len(data) > 2 * levels and not _has_at_most(levels, data)


def _has_at_most(most: int, data: bytes) -> bool:
    """Return whether there are at most this many opening brackets."""
    for bracket in (b"[", b"{"):
        at = data.find(bracket)
        while at >= 0:
            most -= 1
            if most < 0:
                return False
            at = data.find(bracket, at + 1)
    return True


def _check_tree(tree: Any, what: str, limits: Limits) -> None:
    """Check depth and numbers level by level, so that the check needs no stack."""
    items = [tree]
    for _ in range(limits.depth_max + 1):
        if _restricts_numbers(limits):
            _check_numbers(items, what, limits)
        if _CONTAINERS.isdisjoint(map(type, items)):
            return
        items = _items_inside([item for item in items if type(item) in _CONTAINERS])
    raise too_deep(what, limits)


def _restricts_numbers(limits: Limits) -> bool:
    # msgspec refuses numbers above its limit; a lower limit is checked here.
    return limits.number_digits_max < DEFAULT_LIMITS.number_digits_max


def _check_numbers(items: list[Any], what: str, limits: Limits) -> None:
    for item in items:
        if type(item) is int and not is_short_enough(item, limits):
            raise too_long_a_number(f"a number in {what}", len(str(item)), limits)


def _encode_msgpack(value: object, root: str) -> bytes:
    limits = DEFAULT_LIMITS
    lowering = Lowering("msgpack", tags=False, limits=limits)
    data = _to_msgpack(lowering.lower(value, (None, root), limits.depth_max))
    check_size(root, len(data), limits)
    return data


def _decode_msgpack(data: bytes, limits: Limits) -> Any:
    check_size("the msgpack data", len(data), limits)
    try:
        tree = _MSGPACK.decode(data)
    except RecursionError as error:
        raise too_deep("the msgpack data", limits) from error
    # A map key that cannot be hashed, or a date out of range, raises another kind of error.
    except (ValueError, TypeError, OverflowError) as error:
        raise BadMessage(f"msgpack data cannot be decoded: {error}; it begins {data[:60]!r}") from error
    _check_tree(tree, "the msgpack data", limits)
    return tree


def _encode_pickle(value: object, root: str) -> bytes:
    def refuse(error: Exception) -> bytes:
        raise BadValue(f"{root} cannot be pickled: {error!r}") from error

    import pickle  # rarely used, and takes 300 kB of memory in every process

    data = attempt(pickle.dumps, value, refuse)
    check_size(root, len(data), DEFAULT_LIMITS)
    return data


def _decode_pickle(data: bytes, limits: Limits) -> Any:
    def refuse(error: Exception) -> Any:
        raise BadMessage(f"pickled data cannot be decoded: {error!r}") from error

    import pickle

    check_size("the pickled data", len(data), limits)
    return attempt(pickle.loads, data, refuse)


def _encode_json(value: object, root: str) -> bytes:
    return encode_json(value, root=root)


def _decode_json(data: bytes, limits: Limits) -> Any:
    return decode_json(data, limits=limits)


SERIALIZERS = {
    "json": Serializer(JSON_CONTENT, "utf-8", _encode_json, _decode_json),
    "msgpack": Serializer("application/x-msgpack", "binary", _encode_msgpack, _decode_msgpack),
    "pickle": Serializer("application/x-python-serialize", "binary", _encode_pickle, _decode_pickle),
}
"""By name, as in the settings. Reading pickle runs code of the sender, so it must be accepted explicitly."""
