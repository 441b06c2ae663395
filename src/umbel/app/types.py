"""Types: checks and converts arguments and return values by the annotations of a task's function.

The sender lowers the arguments to values that a message can carry, and refuses those that the worker could
not parse. The child parses them, in one compiled step for all parameters. For a return value, the child
lowers and the caller parses. A value whose annotation cannot be checked is neither checked nor converted; a
task with only such annotations has no `CallTypes`.

This is the only module that imports pydantic, and it does so only for tasks whose annotations name it.
"""

import collections.abc
import dataclasses
import datetime
import enum
import inspect
import re
import sys
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from decimal import Decimal
from pathlib import PurePath
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, Optional, Union, get_args, get_origin
from uuid import UUID

import msgspec

from umbel.errors import BadValue, ConfigurationError, WrongType
from umbel.wire.show import brief
from umbel.wire.typed import PYDANTIC_FORM, from_tree, to_tree

if TYPE_CHECKING:
    from umbel.app.task import Parameters

# ---- types of pydantic ------------------------------------------------------------------------------


class PydanticType:
    """Converts the values of one parameter or result by pydantic's rules.

    The values are sent as pydantic's JSON, so its rules for JSON apply where they are parsed, also for strict
    models.
    """

    def __init__(self, annotation: Any) -> None:
        from pydantic import PydanticUserError, TypeAdapter

        try:
            self._adapter: Any = TypeAdapter(annotation)
        except PydanticUserError as error:
            if error.code == "class-not-fully-defined":
                raise NameError(error.message) from None
            raise

    def lower(self, value: Any) -> Any:
        """The value as a tree. A value of another type that can be sent is sent unchanged."""
        return self._adapter.dump_python(value, warnings=False, **PYDANTIC_FORM)

    def parse(self, tree: Any) -> Any:
        """The value from its tree; ValueError names the part that does not fit."""
        try:
            return self._adapter.validate_json(_as_json(tree))
        except ValueError as error:
            raise ValueError(_first_problem(error)) from None


def make(kind: type[Any], tree: Any) -> Any:
    """Make a value of a type that msgspec does not know: a path, or a pydantic model inside another type."""
    if isinstance(tree, kind):
        return tree
    if issubclass(kind, PurePath):
        return kind(tree)
    if (validator := getattr(kind, "__pydantic_validator__", None)) is not None:
        return validator.validate_json(_as_json(tree))
    raise TypeError(f"a {kind.__name__} cannot be made from JSON; annotate another type")


def _as_json(tree: Any) -> bytes:
    """The tree as JSON that pydantic reads, tagged values included."""
    from pydantic_core import to_json

    return to_json(tree)


def _first_problem(error: Any) -> str:
    """The first problem that pydantic reports, and how many more there are."""
    found = error.errors(include_url=False) if hasattr(error, "errors") else []
    if not found:
        return str(error)
    place = "".join(f"[{part!r}]" for part in found[0]["loc"])
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    return f"{found[0]['msg']}{f' - at {place}' if place else ''}{more}"


# ---- annotations -----------------------------------------------------------------------------------
#
# An annotation is *plain* if JSON carries its values unchanged (`int`, `list[str]`, `dict[str, Any]`), or if
# its class is unknown. Then nothing is checked or converted. For any other annotation `convertible` returns
# the type that msgspec converts to.

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
    """The function's signature; names in annotations may still be unknown."""
    if sys.version_info >= (3, 14):
        import annotationlib

        return inspect.signature(function, annotation_format=annotationlib.Format.FORWARDREF)
    return inspect.signature(function)


def resolved(function: Callable[..., Any], annotation: Any) -> Any:
    """The annotation with its names resolved; NameError if a name is not known (yet)."""
    if isinstance(annotation, type):
        return annotation  # most annotations contain no name

    def holder() -> None: ...

    holder.__annotations__ = {"it": annotation}
    innermost = inspect.unwrap(function)
    names = getattr(innermost, "__globals__", {})
    return typing.get_type_hints(holder, names, _enclosing(innermost), include_extras=True)["it"]


def _enclosing(function: Any) -> dict[str, Any]:
    """The variables of enclosing functions that this function uses."""
    try:
        return dict(inspect.getclosurevars(function).nonlocals)
    except (TypeError, ValueError):  # not a Python function, or a variable without a value
        return {}


def is_plain(annotation: Any) -> bool:
    """Whether JSON carries such values unchanged, or the type is unknown."""
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
    """Whether only pydantic can convert it: models, dataclasses and validators of pydantic."""
    if (stands_for := _stands_for(annotation)) is not None:
        return is_pydantic(stands_for)
    inner = get_args(annotation)
    if get_origin(annotation) is Annotated:
        return _of_pydantic(inner[1:]) or is_pydantic(inner[0])
    if get_origin(annotation) is Literal:
        return False
    return _has_validator(get_origin(annotation) or annotation) or any(map(is_pydantic, inner))


def convertible(annotation: Any) -> Any:
    """The type that msgspec converts to; unknown types in it become Any."""
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
        return types.GenericAlias(
            tuple, tuple(argument if argument is ... else convertible(argument) for argument in inner)
        )
    if origin in _ITERABLES:
        return types.GenericAlias(list, (convertible(inner[0]),))
    if origin in _LISTS | _SETS | _MAPS:
        return origin[tuple(map(convertible, inner))]
    return annotation if _is_known(origin or annotation) else Any


def _union(members: Iterable[Any]) -> Any:
    made = [convertible(member) for member in members]
    if str in made:  # a path is sent as text, and may stay text where text is accepted
        made = [member for member in made if not (isinstance(member, type) and issubclass(member, PurePath))]
    tagged = [member for member in made if _is_one_of(member, _TAGGED)]
    is_carried = all(_is_one_of(member, PLAIN_TYPES | _TAGGED) for member in made)
    if is_carried and tagged and len(tagged) + made.count(str) > 1:
        return Any  # msgspec cannot distinguish them, but the tags in JSON restore the type of each
    return Union[tuple(made)]  # noqa: UP007 (made of values)


_TAGGED = frozenset({datetime.datetime, datetime.date, datetime.time, Decimal, UUID, bytes})


def _annotated(kind: Any, constraints: Mapping[str, Any]) -> Any:
    return Annotated[kind, msgspec.Meta(**constraints)] if constraints and kind is not Any else kind


_SIMPLE = ("gt", "ge", "lt", "le", "multiple_of", "min_length", "max_length", "pattern")


def _constraints(metadata: Iterable[Any]) -> dict[str, Any]:
    """The constraints of msgspec.Meta, annotated-types, and simple fields of pydantic."""
    found: dict[str, Any] = {}
    for item in metadata:
        if _is_field(item):
            found |= _constraints(item.metadata)
        elif isinstance(item, msgspec.Meta) or _module_of(item) in {"annotated_types", "pydantic"}:
            stated = {name: getattr(item, name, None) for name in _SIMPLE}
            found |= {name: value for name, value in stated.items() if value is not None}
            if isinstance(item, msgspec.Meta) and item.tz is not None:
                found["tz"] = item.tz
    return found


def _of_pydantic(metadata: Iterable[Any]) -> bool:
    """Whether the metadata of pydantic contains more than simple constraints."""
    return any(_module_of(item) == "pydantic" and not _is_simple(item) for item in metadata)


def _is_simple(item: Any) -> bool:
    if _is_field(item):
        return item.discriminator is None and not _of_pydantic(item.metadata)
    return vars(item).keys() <= {"pattern"} if hasattr(item, "__dict__") else False


def _is_field(item: Any) -> bool:
    return _module_of(item) == "pydantic" and hasattr(item, "metadata") and hasattr(item, "discriminator")


def _module_of(item: Any) -> str:
    return type(item).__module__.partition(".")[0]


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
    """Whether values of this type change in JSON and can be rebuilt from it."""
    if not isinstance(kind, type) or kind.__module__.startswith("umbel."):  # errbacks are given a Request
        return False
    if issubclass(kind, enum.Flag):  # combined flags are not members, so they stay numbers
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


# ---- types of a call -------------------------------------------------------------------------------

RESULT = "return"


def types_of(parameters: "Parameters", *, sensitive: Collection[str] = ()) -> "CallTypes | None":
    """The types of a task; None if there is nothing to check.

    Names that are still unknown are resolved at the first call. Errors do not show `sensitive` arguments.
    """
    types = CallTypes(parameters, sensitive)
    try:
        return types if types.build() else None
    except NameError:
        return types


class CallTypes:
    """Checks and converts the arguments and the result of one task."""

    def __init__(self, parameters: "Parameters", sensitive: Collection[str]) -> None:
        self._task = parameters.task
        self._parameters = parameters
        self._sensitive = frozenset(sensitive)
        self._arguments: _Arguments | None = None
        self._result: _Values | None = None
        self._is_ready = False

    def build(self) -> bool:
        """Resolve all names and compile the types, once; returns whether calls have anything to check.

        NameError: a name is not known yet.
        """
        if not self._is_ready:
            kinds = {parameter.name: self._kind_of(parameter) for parameter in self._parameters.every}
            returned = self._resolved(RESULT, self._parameters.returns)
            typed = {name: kind for name, kind in kinds.items() if not is_plain(kind)}
            self._arguments = _arguments(self._parameters, typed) if typed else None
            if not is_plain(returned):
                self._result = _values(self._task, {RESULT: returned})
            self._is_ready = True
        return self._arguments is not None or self._result is not None

    def require(self) -> None:
        """Build; ConfigurationError for names that are still unknown."""
        try:
            self.build()
        except NameError as error:
            raise ConfigurationError(
                f"an annotation of task {self._task!r} cannot be resolved: {error}. Import that name where "
                "the task is defined (not only under TYPE_CHECKING), or define the task with typing=False"
            ) from None

    def lower(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], serializer: str = "json"
    ) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """The arguments for the message; WrongType for an argument that the worker could not parse."""
        if not self._is_ready:
            self.require()
        if self._arguments is None:
            return args, kwargs
        given = self._arguments.given(args, kwargs)
        lowered = self._arguments.values.lower(given, self._refused, tags=serializer != "msgpack")
        if serializer == "pickle":  # it needs no conversion
            return args, kwargs
        return self._arguments.put(args, kwargs, lowered)

    def parse(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """The arguments as the function takes them. Values that fit already stay unchanged."""
        if not self._is_ready:
            self.require()
        if self._arguments is None:
            return list(args), dict(kwargs)
        given = self._arguments.given(args, kwargs)
        return self._arguments.put(args, kwargs, self._arguments.values.parse(given, self._refused))

    def lower_result(self, value: Any) -> Any:
        """The return value as it is stored; WrongType if it does not fit its annotation."""
        if self._result is None:
            return value
        return self._result.lower({RESULT: value}, self._refused)[RESULT]

    def parse_result(self, tree: Any) -> Any:
        """The return value, from the stored tree."""
        if not self._is_ready:
            self.require()
        if self._result is None:
            return tree
        return self._result.parse({RESULT: tree}, self._refused)[RESULT]

    def _refused(self, name: str, value: Any, problem: str) -> WrongType:
        what = f"the result of {self._task}" if name == RESULT else f"argument {name!r} of {self._task}"
        if name in self._sensitive:
            return WrongType(f"{what} does not fit its type; the reason is hidden, as `sensitive` names it")
        if not name:  # an unknown argument: the problem may quote a sensitive value
            hint = "" if self._sensitive else f": {problem}"
            return WrongType(f"an argument of {self._task} does not fit its type{hint}")
        return WrongType(f"{what} is {brief(value)}, which does not fit its type: {problem}")

    def _kind_of(self, parameter: inspect.Parameter) -> Any:
        if parameter.annotation is parameter.empty:
            return Any
        found = self._resolved(parameter.name, parameter.annotation)
        if parameter.kind is parameter.VAR_POSITIONAL:
            return list[found]  # type: ignore[valid-type]
        if parameter.kind is parameter.VAR_KEYWORD:
            return dict[str, found]  # type: ignore[valid-type]
        return Optional[found] if parameter.default is None else found  # noqa: UP045 (made of values)

    def _resolved(self, name: str, annotation: Any) -> Any:
        try:
            return resolved(self._parameters.function, annotation)
        except AttributeError as error:  # of a module, which may define the attribute later
            raise NameError(str(error)) from None
        except (SyntaxError, TypeError) as error:
            raise ConfigurationError(
                f"the annotation {annotation!r} of {_what(name)} of task {self._task!r} is no type: {error}. "
                "Change it, or define the task with typing=False"
            ) from None


class EachResult:
    """The type of a list of results of one task, as `map` and `starmap` return it."""

    def __init__(self, types: CallTypes) -> None:
        self._types = types

    def parse_result(self, tree: Any) -> Any:
        """The list with each result parsed; anything else unchanged."""
        return [self._types.parse_result(item) for item in tree] if isinstance(tree, list) else tree


ResultTypes = CallTypes | EachResult
Refusal = Callable[[str, Any, str], WrongType]
"""Makes the error from the name of a value, the value and the problem."""


class _Values:
    """Values by name, each with its type: most are compiled into one Struct; pydantic's are separate."""

    def __init__(
        self, kind: type[msgspec.Struct] | None, names: tuple[str, ...], own: Mapping[str, PydanticType]
    ) -> None:
        self._kind = kind
        self._names = names
        self._own = own

    def lower(self, given: dict[str, Any], refused: Refusal, *, tags: bool = True) -> dict[str, Any]:
        tree = self._lower_own(given, refused)
        try:
            tree |= to_tree({name: given[name] for name in given.keys() - self._own.keys()}, tags=tags)
        except BadValue as error:
            name = str(error).partition(":")[0].partition("[")[0]
            raise refused(name if name in given else "", given.get(name), str(error)) from None
        self.parse(tree, refused)
        return tree

    def parse(self, tree: Mapping[str, Any], refused: Refusal) -> dict[str, Any]:
        made = self._parse_own(tree, refused)
        if self._kind is None or len(made) == len(tree):
            return made
        try:
            values = msgspec.structs.astuple(from_tree(tree, self._kind, make))
        except msgspec.ValidationError as error:
            name, problem = _placed(str(error))
            raise refused(name, tree.get(name), problem) from None
        made.update((name, value) for name, value in zip(self._names, values, strict=True) if name in tree)
        return made

    def _lower_own(self, given: Mapping[str, Any], refused: Refusal) -> dict[str, Any]:
        lowered: dict[str, Any] = {}
        for name in self._own.keys() & given.keys():
            try:
                lowered[name] = self._own[name].lower(given[name])
            except (ValueError, TypeError, AttributeError) as error:
                raise refused(name, given[name], str(error)) from None
        return lowered

    def _parse_own(self, tree: Mapping[str, Any], refused: Refusal) -> dict[str, Any]:
        made: dict[str, Any] = {}
        for name in self._own.keys() & tree.keys():
            try:
                made[name] = self._own[name].parse(tree[name])
            except ValueError as error:
                raise refused(name, tree[name], str(error)) from None
        return made


class _Arguments(NamedTuple):
    """The places of the typed parameters in the arguments of a call, and their types."""

    values: _Values
    places: tuple[tuple[int, str], ...]  # positional ones
    named: frozenset[str]  # those that may be given by name
    rest: tuple[int, str] | None  # *args: from here on
    others: tuple[frozenset[str], str] | None  # **kwargs: all names but these

    def given(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        found = {name: args[place] for place, name in self.places if place < len(args)}
        if kwargs:
            found.update((name, kwargs[name]) for name in self.named.intersection(kwargs))
        if self.rest is not None and len(args) > self.rest[0]:
            found[self.rest[1]] = list(args[self.rest[0] :])
        if self.others is not None:
            known, name = self.others
            found[name] = {key: value for key, value in kwargs.items() if key not in known}
        return found

    def put(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], made: Mapping[str, Any]
    ) -> tuple[list[Any], dict[str, Any]]:
        """The arguments with these values in their places."""
        new_args, new_kwargs = list(args), dict(kwargs)
        for place, name in self.places:
            if place < len(new_args):
                new_args[place] = made[name]
        for name in self.named.intersection(new_kwargs):
            new_kwargs[name] = made[name]
        if self.rest is not None and self.rest[1] in made:
            new_args[self.rest[0] :] = made[self.rest[1]]
        if self.others is not None:
            new_kwargs |= made[self.others[1]]
        return new_args, new_kwargs


def _arguments(parameters: "Parameters", typed: Mapping[str, Any]) -> _Arguments:
    positional, rest, others = parameters.positional, parameters.rest, parameters.others
    by_name = frozenset(parameter.name for parameter in parameters.by_name)
    return _Arguments(
        _values(parameters.task, typed),
        tuple(
            (place, parameter.name) for place, parameter in enumerate(positional) if parameter.name in typed
        ),
        by_name.intersection(typed),
        (len(positional), rest) if rest is not None and rest in typed else None,
        (by_name, others) if others is not None and others in typed else None,
    )


def _values(task: str, stated: Mapping[str, Any]) -> _Values:
    own = {
        name: _compiled(task, name, PydanticType, kind) for name, kind in stated.items() if is_pydantic(kind)
    }
    ours = {name: convertible(kind) for name, kind in stated.items() if name not in own}
    for name, kind in ours.items():
        _compiled(task, name, msgspec.json.Decoder, kind)
    struct = msgspec.defstruct("Values", [_field(place, *typed) for place, typed in enumerate(ours.items())])
    return _Values(struct if ours else None, tuple(ours), own)


def _field(place: int, name: str, kind: Any) -> Any:
    return f"value_{place}", kind, msgspec.field(name=name, default=msgspec.UNSET)


def _compiled(task: str, name: str, compiler: Callable[[Any], Any], kind: Any) -> Any:
    try:
        return compiler(kind)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"the type of {_what(name)} of task {task!r} is not supported: {error}. "
            "Change the annotation, or define the task with typing=False"
        ) from None


def _what(name: str) -> str:
    return "the result" if name == RESULT else f"parameter {name!r}"


def _placed(problem: str) -> tuple[str, str]:
    """The parameter that an error of msgspec names, and the error without the parameter."""
    found = _PLACE.fullmatch(problem)
    if found is None:
        return "", problem
    return found[2], found[1] + (f" - at {found[3]}" if found[3] else "")


# A quoted value comes before the last " - at".
_PLACE = re.compile(r"(.*) - at (?:`key` in )?`\$\.(\w+)(.*)`", re.DOTALL)
