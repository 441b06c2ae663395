"""Signatures: a call that is yet to be made, as a map inside a message (wire 1.8)."""

from typing import Any, TypedDict

from umbel.errors import BadMessage
from umbel.wire.options import broken_rule, is_task_name
from umbel.wire.show import brief


class SignatureMap(TypedDict):
    task: str
    args: list[Any]
    kwargs: dict[str, Any]
    options: dict[str, Any]
    subtask_type: str | None  # "chain", "group", "chord", or None for a plain task
    immutable: bool  # the result of the task before is not put in front of args


def check_signature(value: object) -> SignatureMap:
    """Return what came from the wire as a signature with all six keys, or say what is wrong.

    Keys that we do not know are kept: the map may be passed on to a node that does.
    """
    if not isinstance(value, dict):
        raise BadMessage(f"a signature must be a map, not {brief(value)}")
    task: Any = value.get("task")
    if not is_task_name(task):
        raise BadMessage(f"a signature must name its task, not {brief(task)}")
    checked = {key: _checked(task, key, value) for key in _EMPTY}
    return {**value, "task": task, **checked}  # type: ignore[typeddict-item]


_EMPTY: dict[str, tuple[type | tuple[type, ...], str, Any]] = {  # what it is, in words, and if it is missing
    "args": ((list, tuple), "a list", ()),
    "kwargs": (dict, "a map", {}),
    "options": (dict, "a map", {}),
    "subtask_type": (str, "text", None),
    "immutable": (bool, "true or false", False),
}


def _checked(task: str, key: str, signature: dict[Any, Any]) -> Any:
    kinds, wanted, empty = _EMPTY[key]
    found: Any = signature.get(key)
    if found is None:
        found = empty
    elif not isinstance(found, kinds):
        raise BadMessage(f"the signature of {task!r}: {key} is {brief(found)}; it must be {wanted}")
    if key == "args":
        return list(found)
    if key in ("kwargs", "options"):
        if not all(isinstance(name, str) for name in found):
            raise BadMessage(f"the signature of {task!r}: every key of its {key} must be text")
        if key == "options":
            _check_options(task, found)
        return dict(found)
    return found


def _check_options(task: str, options: dict[str, Any]) -> None:
    for name, value in options.items():
        if (rule := broken_rule(name, value)) is not None:
            problem = f"the option {name!r} of {brief(value)}; it must be {rule.wanted}"
            raise BadMessage(f"the signature of {task!r} has {problem}")
