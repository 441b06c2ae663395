"""What a bootstep that a user wrote says of itself; apart, because apps need no event loop to ask."""

from typing import Any

from umbel.errors import BadBootsteps


def described(kind: object) -> tuple[str, tuple[str, ...]]:
    """Its name and what it requires; BadBootsteps where that cannot be."""
    name: Any = getattr(kind, "name", None)
    if not isinstance(kind, type) or not isinstance(name, str) or not name.isidentifier():
        raise BadBootsteps(f'bootstep {kind!r} is not a class with a name; write a class with name = "mine"')
    requires: Any = getattr(kind, "requires", ())
    if not isinstance(requires, tuple | list) or not all(isinstance(one, str) for one in requires):
        raise BadBootsteps(
            f"requires of bootstep {name!r} is {requires!r}; it must be a tuple of names, as in "
            'requires = ("tasks",)'
        )
    return name, tuple(requires)
