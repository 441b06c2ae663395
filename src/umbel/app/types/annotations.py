"""Annotations: the types that a task's function states, as far as they matter on the wire.

An annotation is *plain* if JSON carries its values by itself (`int`, `list[str]`, `dict[str, Any]`, a
class that nobody here knows): then nothing is checked and nothing converted. Else `convertible` makes
the type of it that msgspec converts to.
"""

import collections.abc
import dataclasses
import datetime
import enum
import inspect
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from decimal import Decimal
from pathlib import PurePath
from typing import Annotated, Any, Literal, Union, get_args, get_origin
from uuid import UUID

import msgspec

PLAIN_TYPES = frozenset({int, str, float, bool, None, type(None), list, dict, Any, object})
_LEAVES = (datetime.date, datetime.time, datetime.timedelta, Decimal, UUID, bytes, PurePath)
_LISTS = frozenset(
    {list, collections.abc.Sequence, collections.abc.MutableSequence, collections.abc.Collection}
)
_SETS = frozenset({set, frozenset, collections.abc.Set, collections.abc.MutableSet})
_MAPS = frozenset({dict, collections.abc.Mapping, collections.abc.MutableMapping})
_ITERABLES = frozenset({collections.abc.Iterable, collections.abc.Reversible})  # a list, once sent
_UNIONS = (Union, types.UnionType)


def signature_of(function: Callable[..., Any]) -> inspect.Signature:
    """The parameters as written: names in annotations that are not known yet are no error here."""
    if sys.version_info >= (3, 14):
        import annotationlib

        return inspect.signature(function, annotation_format=annotationlib.Format.FORWARDREF)
    return inspect.signature(function)


def resolved(function: Callable[..., Any], annotation: Any) -> Any:
    """The annotation with the names in it looked up; NameError when one is not known (yet)."""
    if isinstance(annotation, type):
        return annotation  # as most are: no name in it

    def holder() -> None: ...

    holder.__annotations__ = {"it": annotation}
    innermost = inspect.unwrap(function)
    names = getattr(innermost, "__globals__", {})
    return typing.get_type_hints(holder, names, _enclosing(innermost), include_extras=True)["it"]


def _enclosing(function: Any) -> dict[str, Any]:
    """The names of the functions around this one, as far as it uses them."""
    try:
        return dict(inspect.getclosurevars(function).nonlocals)
    except (TypeError, ValueError):  # no function of Python, or a name that has no value yet
        return {}


def is_plain(annotation: Any) -> bool:
    """Whether JSON carries such values by itself, or nothing is known of them."""
    if _is_one_of(annotation, PLAIN_TYPES):
        return True
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return not _constraints(inner[1:]) and not _of_pydantic(inner[1:]) and is_plain(inner[0])
    if origin in _UNIONS or origin in _LISTS or origin in _ITERABLES:
        return all(map(is_plain, inner))
    if origin in _MAPS:
        return _carries_keys(inner[0]) and is_plain(inner[1])
    if origin is Literal:
        return not _is_checkable(inner)
    if (stands_for := _stands_for(annotation)) is not None:
        return is_plain(stands_for)
    return not _is_known(origin or annotation)


def is_pydantic(annotation: Any) -> bool:
    """Whether pydantic alone understands it: its models, its dataclasses, its validators."""
    if (stands_for := _stands_for(annotation)) is not None:
        return is_pydantic(stands_for)
    inner = get_args(annotation)
    if get_origin(annotation) is Annotated:
        return _of_pydantic(inner[1:]) or is_pydantic(inner[0])
    if get_origin(annotation) is Literal:
        return False
    return _has_validator(get_origin(annotation) or annotation) or any(map(is_pydantic, inner))


def convertible(annotation: Any) -> Any:
    """The type that msgspec converts to: what nobody here knows is Any in it."""
    if annotation is None or _is_one_of(annotation, PLAIN_TYPES - {object}):
        return annotation
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _annotated(convertible(inner[0]), _constraints(inner[1:]))
    if origin in _UNIONS:
        return _union(inner)
    if origin is Literal:
        return annotation if _is_checkable(inner) else Any
    if (stands_for := _stands_for(annotation)) is not None:
        return convertible(stands_for)
    if origin is tuple:
        return types.GenericAlias(tuple, tuple(one if one is ... else convertible(one) for one in inner))
    if origin in _ITERABLES:
        return types.GenericAlias(list, (convertible(inner[0]),))
    if origin in _LISTS | _SETS | _MAPS:
        return origin[tuple(map(convertible, inner))]
    return annotation if _is_known(origin or annotation) else Any


def _union(members: Iterable[Any]) -> Any:
    made = [convertible(one) for one in members]
    if str in made:  # where text is welcome as well, so is a path as the text that it is sent as
        made = [one for one in made if not (isinstance(one, type) and issubclass(one, PurePath))]
    tagged = [one for one in made if _is_one_of(one, _TAGGED)]
    is_carried = all(_is_one_of(one, PLAIN_TYPES | _TAGGED) for one in made)
    if is_carried and tagged and len(tagged) + made.count(str) > 1:
        return Any  # msgspec cannot tell them apart, but JSON's tags do: each comes back as what it was
    return Union[tuple(made)]  # noqa: UP007 (made of values)


_TAGGED = frozenset({datetime.datetime, datetime.date, datetime.time, Decimal, UUID, bytes})


def _annotated(kind: Any, constraints: Mapping[str, Any]) -> Any:
    return Annotated[kind, msgspec.Meta(**constraints)] if constraints and kind is not Any else kind


_SIMPLE = ("gt", "ge", "lt", "le", "multiple_of", "min_length", "max_length", "pattern")


def _constraints(said: Iterable[Any]) -> dict[str, Any]:
    """What msgspec.Meta, annotated-types and the simple part of pydantic's Field demand of a value."""
    found: dict[str, Any] = {}
    for one in said:
        if _is_field(one):
            found |= _constraints(one.metadata)
        elif isinstance(one, msgspec.Meta) or _module_of(one) in {"annotated_types", "pydantic"}:
            stated = {name: getattr(one, name, None) for name in _SIMPLE}
            found |= {name: value for name, value in stated.items() if value is not None}
            if isinstance(one, msgspec.Meta) and one.tz is not None:
                found["tz"] = one.tz
    return found


def _of_pydantic(said: Iterable[Any]) -> bool:
    """Whether one of these is pydantic's and more than a simple constraint."""
    return any(_module_of(one) == "pydantic" and not _is_simple(one) for one in said)


def _is_simple(one: Any) -> bool:
    if _is_field(one):
        return one.discriminator is None and not _of_pydantic(one.metadata)
    return vars(one).keys() <= {"pattern"} if hasattr(one, "__dict__") else False


def _is_field(one: Any) -> bool:
    return _module_of(one) == "pydantic" and hasattr(one, "metadata") and hasattr(one, "discriminator")


def _module_of(one: Any) -> str:
    return type(one).__module__.partition(".")[0]


def _stands_for(annotation: Any) -> Any:
    """The type behind a new name for it: `NewType`, `type X = ...`."""
    if isinstance(annotation, typing.NewType):
        return annotation.__supertype__
    return getattr(annotation, "__value__", None) if type(annotation).__name__ == "TypeAliasType" else None


def _carries_keys(keys: Any) -> bool:
    return keys is str or keys is Any


def _is_checkable(values: Iterable[Any]) -> bool:
    return all(value is None or type(value) in (str, int) for value in values)


def _is_known(kind: Any) -> bool:
    """Whether this is a type that does not survive JSON by itself, and that we can make again."""
    if not isinstance(kind, type) or kind.__module__.startswith("umbel."):  # errbacks are given a Request
        return False
    if issubclass(kind, enum.Flag):  # sums of flags are no members: they stay numbers
        return False
    if kind in _SETS or kind is tuple or _has_validator(kind) or issubclass(kind, (*_LEAVES, enum.Enum)):
        return True
    if typing.is_typeddict(kind):
        return not all(map(is_plain, typing.get_type_hints(kind, include_extras=True).values()))
    return (
        issubclass(kind, msgspec.Struct)
        or dataclasses.is_dataclass(kind)
        or hasattr(kind, "__attrs_attrs__")
        or (issubclass(kind, tuple) and hasattr(kind, "_fields"))
    )


def _has_validator(kind: Any) -> bool:
    return isinstance(kind, type) and hasattr(kind, "__pydantic_validator__")


def _is_one_of(annotation: Any, known: frozenset[Any]) -> bool:
    try:
        return annotation in known
    except TypeError:  # a Literal or Annotated of something that has no hash
        return False
