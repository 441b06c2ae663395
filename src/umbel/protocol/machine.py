"""Machines: the interface of every decision-making part, and the base class of its events and effects.

A machine only decides: it gets an event and the time, and returns effects in the order in which to perform
them. The shell around it owns the clock, the sockets and the processes. `step()` neither waits nor fails, so
the only locking needed is one caller at a time. Events and effects are `Value`s: small frozen records that
are compared by content and cheap to create.

    class Stand(Value):
        members: frozenset[NodeId]

It does the same as `@dataclass(frozen=True, slots=True)`: values are equal if class and content are equal,
hashable, shown as `Stand(members=...)`, and matched by position. A worker imports two hundred such classes
and never uses most of them. A dataclass compiles six methods per class at import. Here the methods are
shared, except `__init__`, which is compiled for the first instance. That saves a megabyte and fifty
milliseconds in every worker that starts.

It supports fields and defaults, but no other feature of dataclasses: no factories, no order, no inherited
fields. msgspec does not support it. Outside of `protocol`, code may import msgspec and use its frozen
`Struct`, which is imported as quickly.
"""

import sys
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Protocol, Self, TypeVar, dataclass_transform

if TYPE_CHECKING:
    from umbel.protocol.leadership.coordination import Instant


# ---- value -----------------------------------------------------------------------------------------

if sys.version_info >= (3, 14):
    import annotationlib


@dataclass_transform(frozen_default=True)
class _ValueType(type):
    def __new__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any]) -> "_ValueType":
        fields = _field_names(namespace) if bases else ()
        namespace["_defaults"] = {field: namespace.pop(field) for field in fields if field in namespace}
        namespace["__slots__"] = namespace["__match_args__"] = fields
        return super().__new__(cls, name, bases, namespace)


class Value(metaclass=_ValueType):
    """A frozen record of named fields, compared by content; a subclass only declares its fields."""

    __match_args__: ClassVar[tuple[str, ...]]
    _defaults: ClassVar[dict[str, Any]]

    def __init__(self, *values: Any, **named: Any) -> None:
        kind = type(self)
        kind.__init__ = _compiled_init(kind)  # type: ignore[method-assign]
        kind.__init__(self, *values, **named)

    def replaced(self, **changes: Any) -> Self:
        """Return a copy with these fields changed."""
        return type(self)(**{field: getattr(self, field) for field in self.__match_args__} | changes)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"{type(self).__name__} is immutable: {name!r} cannot be set")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"{type(self).__name__} is immutable: {name!r} cannot be deleted")

    def __eq__(self, other: object) -> bool:
        if self.__class__ is not other.__class__:
            return NotImplemented
        return all(getattr(self, field) == getattr(other, field) for field in self.__match_args__)

    def __hash__(self) -> int:
        return hash(tuple(getattr(self, field) for field in self.__match_args__))

    def __repr__(self) -> str:
        shown = ", ".join(f"{field}={getattr(self, field)!r}" for field in self.__match_args__)
        return f"{type(self).__qualname__}({shown})"

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        return type(self), tuple(getattr(self, field) for field in self.__match_args__)


def _field_names(namespace: dict[str, Any]) -> tuple[str, ...]:
    """Return a class's fields. Since Python 3.14 a function in the namespace returns the annotations."""
    if sys.version_info >= (3, 14) and "__annotations__" not in namespace:
        annotate = annotationlib.get_annotate_from_class_namespace(namespace)
        return () if annotate is None else tuple(annotate(annotationlib.Format.VALUE))
    return tuple(namespace.get("__annotations__", ()))


def _compiled_init(kind: type[Value]) -> Any:
    fields, defaults = kind.__match_args__, kind._defaults
    taken = [f"{field}=_defaults[{field!r}]" if field in defaults else field for field in fields]
    lines = [f"_set_{field}(self, {field})" for field in fields] or ["pass"]
    scope = {"_defaults": defaults, **{f"_set_{field}": kind.__dict__[field].__set__ for field in fields}}
    exec(f"def __init__({', '.join(('self', *taken))}): {'; '.join(lines)}", scope)
    return scope["__init__"]


# ---- cluster machine and tick ----------------------------------------------------------------------

EventT_contra = TypeVar("EventT_contra", contravariant=True)
EffectT = TypeVar("EffectT")


class Tick(Value):
    """Time has passed. Sent when a machine's deadline is due; early or repeated ticks are harmless."""


class ClusterMachine(Protocol[EventT_contra, EffectT]):
    """A machine whose decisions reach other nodes, so that it needs both clocks."""

    @property
    def deadline(self) -> float | None:
        """Return when the machine wants a Tick, as `Instant.boot_s`; None for never."""
        ...

    def step(self, event: EventT_contra | Tick, now: "Instant") -> list[EffectT]:
        """Process one event and return the effects to perform, in order. Never blocks, never raises."""
        ...
