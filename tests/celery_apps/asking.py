"""What the cases say: which case there is, and how a client asks for what happened to its tasks.

A case is a function that sends tasks and returns what came of them, as plain values. Ids and
processes differ from run to run and are left out of what is compared (`compared`).
"""

import json
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from celery import states
from celery.exceptions import TimeoutError as CeleryTimeoutError

from tests.celery_apps.project.celery import app
from tests.celery_apps.project.journal import store
from tests.celery_apps.project.tasks import one
from tests.waiting import wait_until
from umbel.pools.guard import Raised, call_guarded

WAIT_S = float(os.environ.get("CASE_WAIT_S", "90"))
BACKENDS = ("rpc", "database", "files", "cache", "django")
ID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
GIVEN = re.compile(r"\bgen\d+@|0x[0-9a-f]+")
# How a process was lost is said in other words, with the numbers of processes and jobs.
LOST = re.compile(r"(WorkerLostError', '|WorkerLostError\('|WorkerLostError\", \")(?!<)[^'\"]*")


@dataclass(frozen=True)
class Case:
    name: str
    run: Callable[[], Any]
    quick: bool  # belongs to the slice of every test run
    alone: bool  # no other case runs meanwhile
    setups: tuple[str, ...]


CASES: dict[str, Case] = {}


def case(
    *, quick: bool = False, alone: bool = False, setups: Iterable[str] = ("main",)
) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    def register(run: Callable[[], Any]) -> Callable[[], Any]:
        assert run.__name__ not in CASES, f"two cases are called {run.__name__}"
        CASES[run.__name__] = Case(run.__name__, run, quick, alone, tuple(setups))
        return run

    return register


def everywhere(*, quick: bool = False, without: str = "") -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """A case that runs with every result backend, but perhaps one."""
    return case(quick=quick, setups=[one for one in ("main", "late", *BACKENDS) if one != without])


def outcome_of(one_case: Case) -> Any:
    ran = call_guarded(one_case.run)
    return compared(described(ran.error) if isinstance(ran, Raised) else ran.value)


def compared(value: Any) -> Any:
    """The value as JSON says it, without what differs from run to run."""
    text = json.dumps(value, default=repr, sort_keys=True)
    return json.loads(LOST.sub(r"\1<how>", GIVEN.sub("<varies>", ID.sub("<id>", text))))


def described(error: BaseException) -> Any:
    return {"raises": [f"{type(error).__module__}.{type(error).__qualname__}", str(error)]}


# ---- results ---------------------------------------------------------------------------------------


def got(result: Any, **options: Any) -> Any:
    """What `get` gives or raises; errors of those before it in a chain are raised, too."""
    asked = call_guarded(lambda: result.get(timeout=WAIT_S, **options))
    return described(asked.error) if isinstance(asked, Raised) else asked.value


def ended(result: Any) -> Any:
    """[state, value or error] of this very task."""
    asked = call_guarded(lambda: result.get(timeout=WAIT_S, propagate=False))
    if isinstance(asked, Raised):
        return described(asked.error)
    value = asked.value
    return [result.state, described(value)["raises"] if isinstance(value, BaseException) else value]


def left(result: Any) -> Any:
    """How it ended when all is said: an errback or hook that fails may change what was stored first."""
    ended(result)
    passed()
    return ended(app.AsyncResult(result.id))


def all_ended(results: Iterable[Any]) -> Any:
    return [ended(result) for result in results]


def last_of_traceback(result: Any) -> Any:
    ended(result)
    shown = result.traceback
    return shown and shown.strip().splitlines()[-1]


def is_in_state(result: Any, state: str) -> Any:
    """Wait for a state that is not an end; what was stored with it."""

    def reached() -> Any:
        meta = app.backend.get_task_meta(result.id, cache=False)
        return meta if meta["status"] == state or meta["status"] in states.READY_STATES else None

    meta = waited(reached, what=state)
    return [meta["status"], meta["result"]] if isinstance(meta, dict) else meta


def stays_pending(result: Any, wait_s: float = 1.0) -> Any:
    """No result comes, also after other tasks that were sent later."""
    passed()
    asked = call_guarded(lambda: app.AsyncResult(result.id).get(timeout=wait_s, propagate=False))
    if isinstance(asked, Raised) and isinstance(asked.error, CeleryTimeoutError):
        return app.AsyncResult(result.id).state
    return described(asked.error) if isinstance(asked, Raised) else ["ended", repr(asked.value)]


def passed() -> Any:
    """Another task goes all the way, so what was under way before it has had its time."""
    return one.delay().get(timeout=WAIT_S)


# ---- journals and gates ----------------------------------------------------------------------------


def new_key() -> str:
    return str(uuid4())


def journal(key: str, lines: int) -> list[Any]:
    """So many lines, or what there is when time is over; and what came meanwhile."""
    listed = f"journal:{key}"
    waited(lambda: store().llen(listed) >= lines, what=f"{lines} lines")
    passed()
    return [json.loads(line) for line in store().lrange(listed, 0, -1)]


def sorted_journal(key: str, lines: int) -> list[Any]:
    return sorted(journal(key, lines), key=json.dumps)


def open_gate(gate: str, times: int = 1) -> None:
    for _ in range(times):
        store().rpush(f"gate:{gate}", "open")


def began(gate: str) -> Any:
    """A task stands at the gate."""
    return waited(lambda: store().llen(f"journal:{gate}") >= 1, what="the task to begin")


def waited(condition: Callable[[], Any], *, what: str) -> Any:
    asked = call_guarded(lambda: wait_until(condition, deadline_s=WAIT_S, what=what))
    return described(asked.error) if isinstance(asked, Raised) else asked.value
