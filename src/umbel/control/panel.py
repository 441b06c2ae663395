"""Panel: the commands that a worker accepts, by name and alias.

A command is a function of the worker's state and of keyword arguments; its return value is the reply. Whether
it changes anything decides which workers allow it (`control_allow`). Its arguments have types, so that a
command line can convert them, and the reply to a wrong argument is an error that names it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from inspect import Parameter, Signature, cleandoc, iscoroutinefunction, signature
from typing import Any, TypeVar, overload

import msgspec
from msgspec.structs import replace

from umbel.errors import BadBootsteps, ConfigurationError
from umbel.protocol.pidbox import Request

HandlerT = TypeVar("HandlerT", bound=Callable[..., Any])
Argument = tuple[str, type]
READ_ONLY, EVERYTHING = "read-only", "all"
NO_ANSWER = object()  # returned by a handler that leaves the answer to others
REQUEST = "request"
NAME_CHARS_MAX = 100  # of an unknown command, in the reply

# What clients and workers agree on.
ELECTION_REFUSED = "elections are disabled on this worker"
NO_HANDLER = "no handler for topic"
NOT_NOW = "this worker is starting or stopping; ask again"


class Command(msgspec.Struct, frozen=True):
    """A handler with its description.

    `arguments` are given in order on a command line; `variadic` takes all that follow.
    """

    name: str
    handler: Callable[..., Any]
    changes: bool
    arguments: tuple[Argument, ...] = ()
    variadic: str = ""
    aliases: tuple[str, ...] = ()
    usage: str = ""
    help: str = ""
    is_hidden: bool = False
    is_users: bool = False  # runs off the loop, because it may block
    is_answered: bool = True
    is_stateless: bool = False  # needs nothing of the worker, so that any thread can answer
    types: Mapping[str, type] = {}

    @property
    def is_async(self) -> bool:
        """Whether the handler is a coroutine function."""
        return iscoroutinefunction(self.handler)

    def bind(self, request: Request) -> dict[str, Any]:
        """Return the arguments converted to their types; raises TypeError for one that the handler does not
        take.

        A handler with a parameter `request` gets the whole request.
        """
        known = _signature(self.handler)
        fitting = {name: _as(self.types.get(name), name, value) for name, value in request.arguments.items()}
        if REQUEST in known.parameters:
            fitting[REQUEST] = request
        known.bind(None, **fitting)
        return fitting

    def arguments_from(self, words: Sequence[str]) -> dict[str, Any]:
        """Return the arguments typed on a command line; only given ones are sent. Raises TypeError."""
        given: dict[str, Any] = {}
        rest = list(words)
        for name, kind in self.arguments:
            if rest:
                given[name] = _as(kind, name, rest.pop(0))
        if self.variadic and rest:
            given[self.variadic], rest = rest, []
        if rest:
            raise TypeError(f"{self.name} takes no argument {rest[0]!r}; usage: {self.name} {self.usage}")
        needed = [
            name
            for name, parameter in list(signature(self.handler).parameters.items())[1:]
            if name != REQUEST
            and parameter.default is Parameter.empty
            and parameter.kind is not Parameter.VAR_KEYWORD
        ]
        missing = [name for name in needed if name not in given]
        if missing:
            raise TypeError(f"{self.name} needs {missing[0]}; usage: {self.name} {self.usage}")
        return given


class Panel:
    """A registry of commands; a later command replaces an earlier one of the same name."""

    def __init__(self) -> None:
        self._commands: dict[str, Command] = {}
        self._aliases: dict[str, str] = {}

    @overload
    def control_command(self, function: HandlerT, /) -> HandlerT: ...
    @overload
    def control_command(self, /, **options: Any) -> Callable[[HandlerT], HandlerT]: ...
    def control_command(self, function: Any = None, /, **options: Any) -> Any:
        """Register a command that changes something: `@panel.control_command(args=[("n", int)])`.

        Options: `name`, `alias`, `args`, `variadic`, `signature` (shown as usage), `help`, `hidden`.
        """
        return self._decorator(function, changes=True, **options)

    @overload
    def inspect_command(self, function: HandlerT, /) -> HandlerT: ...
    @overload
    def inspect_command(self, /, **options: Any) -> Callable[[HandlerT], HandlerT]: ...
    def inspect_command(self, function: Any = None, /, **options: Any) -> Any:
        """Register a command that only reads; options as for `control_command`."""
        return self._decorator(function, changes=False, **options)

    def command(self, name: str, *, changes: bool = True, **options: Any) -> Callable[[HandlerT], HandlerT]:
        """Register a handler under a name; the last one registered counts."""

        def register(handler: HandlerT) -> HandlerT:
            self.add(_command(handler, name, changes=changes, **options))
            return handler

        return register

    def add(self, command: Command) -> None:
        """Add a command and its aliases."""
        self._commands[command.name] = command
        self._aliases |= dict.fromkeys(command.aliases, command.name)

    def include(self, other: "Panel") -> None:
        """Add all commands of another panel."""
        for command in other:
            self.add(command)

    def find(self, method: str) -> Command | None:
        """Return the command with this name or alias, or None."""
        return self._commands.get(method) or self._commands.get(self._aliases.get(method, ""))

    def __iter__(self) -> Iterator[Command]:
        return iter(list(self._commands.values()))

    def _decorator(self, function: Any, *, changes: bool, name: str = "", **options: Any) -> Any:
        def register(handler: Callable[..., Any]) -> Callable[..., Any]:
            called = name or getattr(handler, "__name__", "")
            self.add(_command(handler, called, changes=changes, **options))
            return handler

        return register if function is None else register(function)


class UsersPanel(Panel):
    """Commands that users add, `@app.panel.inspect_command`: each runs in a new thread.

    The first parameter is the worker's `WorkerView`; what the function returns is the reply.
    """

    def add(self, command: Command) -> None:
        """Add a command as a user's: it runs in a new thread."""
        super().add(replace(command, is_users=True))


@cache
def _signature(handler: Callable[..., Any]) -> Signature:
    return signature(handler)


def refusal(panel: Panel, method: str, allow: Sequence[str]) -> str:
    """Return why a worker with this `control_allow` refuses a command; "" when it accepts it."""
    command = panel.find(method)
    if command is None:
        return repr(KeyError(method[:NAME_CHARS_MAX]))  # in Celery's words
    if EVERYTHING in allow or command.name in allow or (READ_ONLY in allow and not command.changes):
        return ""
    return f"{command.name} is not allowed here; this worker's control_allow is {', '.join(allow) or 'empty'}"


def describe_step(kind: object) -> tuple[str, tuple[str, ...]]:
    """Return the name and the requirements of a user's bootstep; raises BadBootsteps for an invalid class."""
    name: Any = getattr(kind, "name", None)
    if not isinstance(kind, type) or not isinstance(name, str) or not name.isidentifier():
        raise BadBootsteps(f'bootstep {kind!r} is not a class with a name; write a class with name = "mine"')
    requires: Any = getattr(kind, "requires", ())
    if not isinstance(requires, tuple | list) or not all(isinstance(required, str) for required in requires):
        raise BadBootsteps(
            f"requires of bootstep {name!r} is {requires!r}; it must be a tuple of names, as in "
            'requires = ("tasks",)'
        )
    return name, tuple(requires)


def _command(
    handler: Callable[..., Any],
    name: str,
    *,
    changes: bool,
    args: Iterable[Argument] = (),
    variadic: str = "",
    alias: str | Sequence[str] = (),
    signature: str = "",
    help: str = "",
    hidden: bool = False,
    answered: bool = True,
    stateless: bool = False,
) -> Command:
    if not name:
        raise ConfigurationError(f"{handler!r} has no __name__; name the command with name=")
    arguments = tuple((str(argument), kind) for argument, kind in args)
    types: dict[str, type] = dict(arguments)
    if variadic:
        types[variadic] = list
    return Command(
        name,
        handler,
        changes,
        arguments,
        variadic,
        (alias,) if isinstance(alias, str) else tuple(alias),
        signature,
        help or (cleandoc(handler.__doc__).partition("\n")[0] if handler.__doc__ else ""),
        hidden,
        is_answered=answered,
        is_stateless=stateless,
        types=types,
    )


def _as(kind: type | None, name: str, value: Any) -> Any:
    """Return the value as its type; text from a command line becomes a number or a truth value."""
    if kind is None or value is None or (isinstance(value, kind) and not _is_odd(value, kind)):
        return value
    if kind is list and isinstance(value, str | tuple | dict):
        return [value] if isinstance(value, str) else value
    if kind is bool and isinstance(value, str) and value.lower() in _TRUTHS:
        return _TRUTHS[value.lower()]
    if kind is str and type(value) in (int, float):
        return str(value)
    if kind in (int, float) and isinstance(value, str | int) and not isinstance(value, bool):
        try:
            return kind(value)
        except ValueError:
            pass
    raise TypeError(f"{name} must be {_KINDS.get(kind, kind.__name__)}, not {value!r}"[:300])


def _is_odd(value: object, kind: type) -> bool:
    return kind is int and isinstance(value, bool)


_TRUTHS = {
    "1": True,
    "true": True,
    "yes": True,
    "on": True,
    "0": False,
    "false": False,
    "no": False,
    "off": False,
}
_KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", list: "a list"}
