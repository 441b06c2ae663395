"""The tasks that every app has, under Celery's names: behind `map`, `starmap`, `chunks` and `replace`."""

from collections.abc import Callable, Iterable
from itertools import islice
from typing import TYPE_CHECKING, Any

from umbel.app.canvas.signature import Signature, signature_from
from umbel.app.types.call_types import EachResult

if TYPE_CHECKING:
    from umbel.app.interfaces import SendingApp

MAP_TASK, STARMAP_TASK, CHUNKS_TASK = "celery.map", "celery.starmap", "celery.chunks"
ACCUMULATE_TASK, CLEANUP_TASK = "celery.accumulate", "celery.backend_cleanup"
BUILTIN_TASKS = frozenset({MAP_TASK, STARMAP_TASK, CHUNKS_TASK, ACCUMULATE_TASK, CLEANUP_TASK})


def builtin_functions(app: "SendingApp") -> dict[str, Callable[..., Any]]:
    def run_map(task: Any, it: list[Any]) -> list[Any]:
        call = signature_from(task, app)
        return [call(item) for item in it]

    def run_starmap(task: Any, it: list[list[Any]]) -> list[Any]:
        call = signature_from(task, app)
        return [call(*items) for items in it]

    def run_chunks(task: Any, it: list[list[Any]], n: int) -> list[list[Any]]:
        return [run_starmap(task, part) for part in in_parts(it, n)]

    def accumulate(*args: Any, index: int | None = None, **_: Any) -> Any:
        return args if index is None else args[index]

    def clean_up() -> None:
        """Old results go by themselves here; Celery's scheduler sends this once a day."""

    return {
        MAP_TASK: run_map,
        STARMAP_TASK: run_starmap,
        CHUNKS_TASK: run_chunks,
        ACCUMULATE_TASK: accumulate,
        CLEANUP_TASK: clean_up,
    }


def map_signature(
    app: "SendingApp", name: str, task: Signature[Any], items: Iterable[Any]
) -> Signature[list[Any]]:
    made: Signature[list[Any]] = Signature(name, kwargs={"task": task.to_map(), "it": list(items)}, app=app)
    known = app.find_task(task.task)
    if known is not None and known.options.types is not None:
        made.result_types = EachResult(known.options.types)
    return made


def in_parts(items: Iterable[Any], size: int) -> Iterable[list[Any]]:
    if size < 1:
        raise ValueError(f"chunk size is {size}; it must be at least 1")
    rest = iter(items)
    while part := list(islice(rest, size)):
        yield part
