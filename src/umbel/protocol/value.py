"""Value: the inputs and effects of a machine, as small frozen records.

    class Stand(Value):
        members: frozenset[NodeId]

It is what `@dataclass(frozen=True, slots=True)` makes: equal by content to values of the same class,
hashable, shown as `Stand(members=...)`, matched by position. A worker imports two hundred of them,
most of which it never makes. A dataclass compiles six methods for each when it is imported; here
the methods are shared, and the one worth compiling, `__init__`, is compiled for the first instance.
That is a megabyte and fifty milliseconds less for every worker that starts.

It knows fields and their defaults, nothing else of dataclasses: no factories, no order, no inherited
fields; and msgspec, which reads and writes dataclasses, does not know it. Outside of `protocol`, where
msgspec is at hand, its frozen `Struct` is the record that is quick to import.
"""

import sys
from typing import Any, ClassVar, NoReturn, Self, dataclass_transform

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
    __match_args__: ClassVar[tuple[str, ...]]
    _defaults: ClassVar[dict[str, Any]]

    def __init__(self, *values: Any, **named: Any) -> None:
        kind = type(self)
        kind.__init__ = _compiled_init(kind)  # type: ignore[method-assign]
        kind.__init__(self, *values, **named)

    def replaced(self, **changes: Any) -> Self:
        """The same, but for these fields."""
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
    """From Python 3.14 on a class body leaves a function that gives its annotations, not the annotations."""
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
