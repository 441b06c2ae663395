"""What each pool can do, and the reason for what it cannot: one table, for the worker, the docs and tests.

If a pool cannot honour an option, the worker refuses to start and gives the reason from this table. A limit
that only sometimes ends a task is worse than no limit, because people rely on it.
"""

from collections.abc import Iterable, Mapping

import msgspec

GREEN = frozenset({"asyncio", "gevent"})  # many tasks share a thread, and a task must yield voluntarily
PREFERRED = "prefork"  # the pool that can do everything


class Abilities(msgspec.Struct, frozen=True, kw_only=True):
    """The abilities of one pool. Each text says why the pool cannot do something; "" means that it can."""

    soft_limits: str = ""  # for plain functions and `async def` tasks
    hard_limits: str = ""  # for plain functions
    async_hard_limits: str = ""  # for `async def` tasks
    async_tasks: str = ""  # running `async def` tasks at all
    terminate: str = ""  # ending a running plain function from outside
    async_terminate: str = ""  # ending a running `async def` task from outside
    resize: str = ""
    autoscale: str = ""
    max_tasks_per_child: str = ""
    max_memory_per_child: str = ""
    child_start: str = ""
    gevent_children: str = ""

    def unenforceable(self, *, is_async: bool, soft: bool, hard: bool) -> str:
        """Return why a task with these limits cannot run here; "" if it can."""
        reason = self.soft_limits if soft else ""
        if hard and not reason:
            reason = self.async_hard_limits if is_async else self.hard_limits
        return reason


_NO_KILL = "a thread cannot be ended from outside"
_NO_CHILDREN = "tasks run in the worker's own process: there is no child to replace"
_COROUTINES_ONLY = "plain functions run in threads, and a thread cannot be ended from outside"
_NO_STARTS = "tasks run in the worker's own process: no child is started"
_NO_LOOP = "greenlets have no event loop for `async def` tasks: the asyncio pool has one"
_SHARED = "a child runs many tasks at once and is never idle to be replaced"
_NO_GREENLETS = "it has no greenlets to share among processes"
_ONE_ONLY = "it runs one task at a time"

ABILITIES: Mapping[str, Abilities] = {
    "prefork": Abilities(gevent_children=_NO_GREENLETS),
    "solo": Abilities(
        hard_limits=_NO_KILL,
        async_hard_limits=_NO_KILL,
        terminate=_NO_KILL,
        async_terminate=_NO_KILL,
        resize=_ONE_ONLY,
        autoscale=_ONE_ONLY,
        max_tasks_per_child=_NO_CHILDREN,
        max_memory_per_child=_NO_CHILDREN,
        child_start=_NO_STARTS,
        gevent_children=_NO_GREENLETS,
    ),
    "threads": Abilities(
        hard_limits=_NO_KILL,
        async_hard_limits=_NO_KILL,
        terminate=_NO_KILL,
        async_terminate=_NO_KILL,
        max_tasks_per_child=_NO_CHILDREN,
        max_memory_per_child=_NO_CHILDREN,
        child_start=_NO_STARTS,
        gevent_children=_NO_GREENLETS,
    ),
    "asyncio": Abilities(
        hard_limits=_COROUTINES_ONLY,
        terminate=_COROUTINES_ONLY,
        max_tasks_per_child=_NO_CHILDREN,
        max_memory_per_child=_NO_CHILDREN,
        child_start=_NO_STARTS,
        gevent_children=_NO_GREENLETS,
    ),
    "gevent": Abilities(
        async_hard_limits=_NO_LOOP,
        async_tasks=_NO_LOOP,
        async_terminate=_NO_LOOP,
        max_tasks_per_child=_SHARED,
        max_memory_per_child=_SHARED,
    ),
}

# Settings that need an ability if they are not at their defaults.
OPTIONS: Mapping[str, str] = {
    "worker_child_start": "child_start",
    "worker_autoscale": "autoscale",
    "worker_gevent_children": "gevent_children",
    "worker_max_tasks_per_child": "max_tasks_per_child",
    "worker_max_memory_per_child": "max_memory_per_child",
    "worker_max_memory_hard": "max_memory_per_child",
}

# Titles of the rows in the documentation.
TITLES: Mapping[str, str] = {
    "soft_limits": "soft time limits",
    "hard_limits": "hard time limits",
    "async_hard_limits": "hard time limits of `async def` tasks",
    "async_tasks": "`async def` tasks",
    "terminate": "ending a running task (`revoke --terminate`)",
    "async_terminate": "ending a running `async def` task",
    "resize": "growing and shrinking while it runs",
    "autoscale": "autoscaling",
    "max_tasks_per_child": "`max_tasks_per_child`",
    "max_memory_per_child": "`max_memory_per_child`",
    "child_start": "`worker_child_start`",
    "gevent_children": "`worker_gevent_children`",
}


def lacks(pool: str, ability: str) -> str:
    """Return why the pool cannot do this; "" if it can."""
    reason: str = getattr(ABILITIES[pool], ability)
    return reason


def table() -> Iterable[str]:
    """Yield the lines of the table in `docs/pools.md`; a test compares the two."""
    yield f"| | {' | '.join(f'`{name}`' for name in ABILITIES)} |"
    yield f"|---|{'---|' * len(ABILITIES)}"
    notes: dict[str, int] = {}
    for name in Abilities.__struct_fields__:
        cells = []
        for pool in ABILITIES:
            reason = lacks(pool, name)
            cells.append(f"no ({notes.setdefault(reason, len(notes) + 1)})" if reason else "yes")
        yield f"| {TITLES[name]} | {' | '.join(cells)} |"
    yield ""
    for reason, number in notes.items():
        yield f"{number}. {reason[0].upper()}{reason[1:]}."
