"""CallTypes: the types of one task's parameters and of its result, ready to check and to convert.

Who sends a call lowers its arguments to what travels, and is refused what the other side could not
parse. The child parses them, in one compiled step for all parameters. The result goes the same way back.
A task whose annotations are all plain has no CallTypes.
"""

import inspect
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, Optional, Protocol

import msgspec

from umbel.app.types.annotations import convertible, is_plain, is_pydantic, resolved
from umbel.app.types.pydantic_type import PydanticType, make
from umbel.errors import BadValue, ConfigurationError, WrongType
from umbel.wire.show import brief
from umbel.wire.trees import from_tree, to_tree

RESULT = "return"
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def types_of(
    task: str,
    function: Callable[..., Any],
    parameters: Sequence[inspect.Parameter],
    returns: Any,
    *,
    sensitive: Collection[str] = (),
) -> "CallTypes | None":
    """None: there is nothing to do. Names that are not known yet are looked up at the first call.

    `parameters` are those that a caller sees; errors do not show the values of `sensitive` ones.
    """
    types = CallTypes(task, function, parameters, returns, sensitive)
    try:
        return types if types.build() else None
    except NameError:
        return types


class ResultTypes(Protocol):
    """What a result needs to know: how its value is made of what was stored."""

    def parse_result(self, tree: Any) -> Any: ...


class EachResult:
    """The result is a list of results of one task, as `map` and `starmap` have them."""

    def __init__(self, types: ResultTypes) -> None:
        self._types = types

    def parse_result(self, tree: Any) -> Any:
        return [self._types.parse_result(one) for one in tree] if isinstance(tree, list) else tree


class CallTypes:
    def __init__(
        self,
        task: str,
        function: Callable[..., Any],
        parameters: Sequence[inspect.Parameter],
        returns: Any,
        sensitive: Collection[str],
    ) -> None:
        self._task = task
        self._sensitive = frozenset(sensitive)
        self._function = function
        self._parameters = parameters
        self._returns = returns
        self._arguments: _Arguments | None = None
        self._result: _Values | None = None
        self._is_ready = False

    def build(self) -> bool:
        """Look up all names and compile the types, once; whether there is anything to do for calls.

        NameError: a name is not known yet.
        """
        if not self._is_ready:
            stated = {one.name: self._stated(one) for one in self._parameters}
            returned = self._resolved(RESULT, self._returns)
            typed = {name: kind for name, kind in stated.items() if not is_plain(kind)}
            self._arguments = _arguments(self._task, self._parameters, typed) if typed else None
            if not is_plain(returned):
                self._result = _values(self._task, {RESULT: returned})
            self._is_ready = True
        return self._arguments is not None or self._result is not None

    def require(self) -> None:
        """Refuse names that are still not known."""
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
        """The arguments as they travel; WrongType when the worker could not parse them."""
        if not self._is_ready:
            self.require()
        if self._arguments is None:
            return args, kwargs
        given = self._arguments.given(args, kwargs)
        lowered = self._arguments.values.lower(given, self._refused, tags=serializer != "msgpack")
        if serializer == "pickle":  # it carries the objects themselves
            return args, kwargs
        return self._arguments.put(args, kwargs, lowered)

    def parse(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """The arguments as the function wants them. Values that are so already stay as they are."""
        if not self._is_ready:
            self.require()
        if self._arguments is None:
            return list(args), dict(kwargs)
        given = self._arguments.given(args, kwargs)
        return self._arguments.put(args, kwargs, self._arguments.values.parse(given, self._refused))

    def lower_result(self, value: Any) -> Any:
        if self._result is None:
            return value
        return self._result.lower({RESULT: value}, self._refused)[RESULT]

    def parse_result(self, tree: Any) -> Any:
        if not self._is_ready:
            self.require()
        if self._result is None:
            return tree
        return self._result.parse({RESULT: tree}, self._refused)[RESULT]

    def _refused(self, name: str, value: Any, problem: str) -> WrongType:
        what = f"the result of {self._task}" if name == RESULT else f"argument {name!r} of {self._task}"
        if name in self._sensitive:
            return WrongType(f"{what} does not fit its type; the reason is hidden, as `sensitive` names it")
        if not name:  # whose value it is cannot be told, nor what the complaint quotes
            hint = "" if self._sensitive else f": {problem}"
            return WrongType(f"an argument of {self._task} does not fit its type{hint}")
        return WrongType(f"{what} is {brief(value)}, which does not fit its type: {problem}")

    def _stated(self, parameter: inspect.Parameter) -> Any:
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
            return resolved(self._function, annotation)
        except AttributeError as error:  # of a module whose name is known: that may come true later as well
            raise NameError(str(error)) from None
        except (SyntaxError, TypeError) as error:
            raise ConfigurationError(
                f"the annotation {annotation!r} of {_what(name)} of task {self._task!r} is no type: {error}. "
                "Change it, or define the task with typing=False"
            ) from None


Refusal = Callable[[str, Any, str], WrongType]
"""Makes the error from the name of a value, the value and what is wrong with it."""


class _Values:
    """Values by name, each with its type: most are compiled into one Struct, pydantic has its own."""

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
    """Where the typed parameters of a function are found in a call, and their types."""

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
            found[name] = {one: value for one, value in kwargs.items() if one not in known}
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


def _arguments(task: str, parameters: Sequence[inspect.Parameter], typed: Mapping[str, Any]) -> _Arguments:
    positional = [one for one in parameters if one.kind in _POSITIONAL]
    by_name = [one.name for one in parameters if one.kind in _BY_NAME]
    rest = next((one.name for one in parameters if one.kind is one.VAR_POSITIONAL), None)
    others = next((one.name for one in parameters if one.kind is one.VAR_KEYWORD), None)
    return _Arguments(
        _values(task, typed),
        tuple((place, one.name) for place, one in enumerate(positional) if one.name in typed),
        frozenset(by_name).intersection(typed),
        (len(positional), rest) if rest in typed and rest is not None else None,
        (frozenset(by_name), others) if others in typed and others is not None else None,
    )


_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def _values(task: str, stated: Mapping[str, Any]) -> _Values:
    own = {
        name: _compiled(task, name, PydanticType, kind) for name, kind in stated.items() if is_pydantic(kind)
    }
    ours = {name: convertible(kind) for name, kind in stated.items() if name not in own}
    for name, kind in ours.items():
        _compiled(task, name, msgspec.json.Decoder, kind)
    struct = msgspec.defstruct("Values", [_field(place, *one) for place, one in enumerate(ours.items())])
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
    """The parameter that a complaint of msgspec is about, and the complaint without it."""
    found = _PLACE.fullmatch(problem)
    if found is None:
        return "", problem
    return found[2], found[1] + (f" - at {found[3]}" if found[3] else "")


# What it quotes of a value stands before the last " - at".
_PLACE = re.compile(r"(.*) - at (?:`key` in )?`\$\.(\w+)(.*)`", re.DOTALL)
