"""Unrun: the tasks of a step that will never run, because one before it failed.

Who waits for one of them must learn that, and a chord that counts one of them must count it as failed. A
step is a map as it travels in messages; what a peer wrote in another form has no tasks.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from umbel.backends.interface import ChordPart
from umbel.wire.task import SignatureMap

Options = Mapping[str, Any]


def ids_in(steps: Iterable[object]) -> Iterator[str]:
    """The ids of all tasks in these steps: of chains, of the members of groups, of headers and bodies."""
    for step in steps:
        whole = step if isinstance(step, dict) else {}
        kind, inside = whole.get("subtask_type"), _inside(whole)
        options = whole.get("options")
        task_id = options.get("task_id") if isinstance(options, dict) else None
        if kind not in _COMPOSED and isinstance(task_id, str) and task_id:
            yield task_id
        yield from ids_in(one for several in inside.values() for one in several)


def parts_in(step: object, status: str, payload: bytes) -> tuple[list[ChordPart], SignatureMap | None]:
    """The parts of a chord that the end of this step would be, as ended so; and the body of that chord."""
    found = [one for one in _ends_of(step) if one.get("group_id") and one.get("task_id")]
    parts = [
        ChordPart(one["group_id"], one.get("group_index"), one["task_id"], status, payload) for one in found
    ]
    return parts, found[0]["chord"] if found else None


def _ends_of(step: object) -> list[Options]:
    """The options of the tasks at the end of a step that belong to a chord: of a group, those of all."""
    whole = step if isinstance(step, dict) else {}
    inside, options = _inside(whole), whole.get("options")
    match whole.get("subtask_type"):
        case "chain":
            ends = inside.get("tasks", [])[-1:]
        case "chord":
            ends = inside.get("body", [])
        case "group":
            ends = inside.get("tasks", [])
        case _:
            return [options] if isinstance(options, dict) and options.get("chord") else []
    return [found for one in ends for found in _ends_of(one)]


_COMPOSED = frozenset({"chain", "group", "chord"})


def _inside(whole: Mapping[str, Any]) -> dict[str, list[Any]]:
    """What a chain, a group or a chord is made of, each as a list."""
    kwargs = whole.get("kwargs")
    if whole.get("subtask_type") not in _COMPOSED or not isinstance(kwargs, dict):
        return {}
    named = {name: kwargs[name] for name in ("tasks", "header", "body") if kwargs.get(name) is not None}
    lists = {name: list(one) if isinstance(one, list | tuple) else [one] for name, one in named.items()}
    return {name: [one for one in items if isinstance(one, dict)] for name, items in lists.items()}
