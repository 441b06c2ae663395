"""PydanticType: a type that pydantic understands, for one parameter or result.

Its values travel as pydantic's own JSON, so that its rules for JSON hold on the other side, strict models
included. The only place that imports pydantic: for tasks whose annotations name it.
"""

from pathlib import PurePath
from typing import Any

from umbel.wire.json_lowering import PYDANTIC_FORM


class PydanticType:
    def __init__(self, annotation: Any) -> None:
        from pydantic import PydanticUserError, TypeAdapter

        try:
            self._adapter: Any = TypeAdapter(annotation)
        except PydanticUserError as error:
            if error.code == "class-not-fully-defined":
                raise NameError(error.message) from None
            raise

    def lower(self, value: Any) -> Any:
        """The value as a tree. What is none of its type, and can be sent, is sent as it is."""
        return self._adapter.dump_python(value, warnings=False, **PYDANTIC_FORM)

    def parse(self, tree: Any) -> Any:
        """ValueError says what does not fit."""
        try:
            return self._adapter.validate_json(_as_json(tree))
        except ValueError as error:
            raise ValueError(_told(error)) from None


def make(kind: type[Any], tree: Any) -> Any:
    """A value of a type that msgspec does not know: a path, or one of pydantic's inside others."""
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


def _told(error: Any) -> str:
    """The first of its complaints, and how many more there are."""
    found = error.errors(include_url=False) if hasattr(error, "errors") else []
    if not found:
        return str(error)
    place = "".join(f"[{one!r}]" for one in found[0]["loc"])
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    return f"{found[0]['msg']}{f' - at {place}' if place else ''}{more}"
