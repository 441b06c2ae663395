"""Secrecy: which parameters of a task's function are sensitive, from their names and its signature."""

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING

from umbel.errors import ConfigurationError, nearest
from umbel.protocol.delivery.sensitive import Sensitive

if TYPE_CHECKING:
    from umbel.app.interfaces import SendingApp

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def sensitive_of(
    task: str, names: Sequence[str], parameters: Sequence[inspect.Parameter]
) -> Sensitive | None:
    """`parameters` are those that a caller sees. A name that the function does not have is refused."""
    if not names:
        return None
    known = {one.name: one for one in parameters}
    takes_more = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters)
    for name in names:
        if name not in known and not takes_more:
            near = nearest(name, known)
            hint = f"; did you mean {near!r}?" if near else ""
            raise ConfigurationError(
                f"task {task!r} has no parameter {name!r}, which `sensitive` names{hint}"
            )
    positional = [one.name for one in parameters if one.kind in _POSITIONAL]
    rest = next((one.name for one in parameters if one.kind is inspect.Parameter.VAR_POSITIONAL), None)
    others = next((one.name for one in parameters if one.kind is inspect.Parameter.VAR_KEYWORD), None)
    plain = frozenset(known) - {rest, others}
    return Sensitive(
        names=frozenset(names),
        positions=frozenset(place for place, name in enumerate(positional) if name in names),
        rest_from=len(positional) if rest in names else None,
        other_names=plain if others in names else None,
    )


def has_secrets(app: "SendingApp", task: str | None) -> bool:
    """Whether the task of that name has arguments that nobody may read."""
    known = app.tasks.get(task or "")
    return known is not None and known.options.hides is not None
