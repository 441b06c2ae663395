"""Commands about the process itself: its pool, its memory, its end."""

from typing import Any

from umbel.control.panel import Panel
from umbel.control.state import NodeSection, PoolSection

panel = Panel()

GROW_MAX = 1000
_AUTOSCALED = "{} is not supported with autoscale. Adjust autoscale range instead."


@panel.control_command(args=[("n", int)], signature="[N=1]")
def pool_grow(state: PoolSection, n: int = 1, **_: Any) -> dict[str, str]:
    """Start more children."""
    if state.is_autoscaled:
        return {"error": _AUTOSCALED.format("pool_grow")}
    state.resize_pool(_checked(n))
    return {"ok": "pool will grow"}


@panel.control_command(args=[("n", int)], signature="[N=1]")
def pool_shrink(state: PoolSection, n: int = 1, **_: Any) -> dict[str, str]:
    """End children that are idle, or as soon as they are."""
    if state.is_autoscaled:
        return {"error": _AUTOSCALED.format("pool_shrink")}
    state.resize_pool(-_checked(n))
    return {"ok": "pool will shrink"}


@panel.control_command(args=[("reload", bool)], signature="[RELOAD]")
def pool_restart(state: PoolSection, reload: bool = False, **_: Any) -> dict[str, str]:
    """Replace the children one by one, as they become idle; with RELOAD, load the app again first."""
    state.restart_pool(reload=bool(reload))
    return {"ok": "reload started"}


@panel.control_command(args=[("max", int), ("min", int)], signature="[MAX [MIN]]")
def autoscale(state: PoolSection, max: int | None = None, min: int | None = None) -> dict[str, str]:
    """Let the pool grow and shrink between these sizes."""
    most, least = state.autoscale(max, min)
    return {"ok": f"autoscale now max={most} min={least}"}


@panel.control_command(args=[("msg", str)], answered=False)
def shutdown(state: PoolSection, msg: str = "", **_: Any) -> None:  # noqa: ARG001 (Celery sends it)
    """Finish what runs and end."""
    state.stop()


@panel.inspect_command
async def stacks(state: PoolSection, **_: Any) -> dict[str, dict[str, str]]:
    """What each child is at, for a task that is stuck."""
    return await state.stacks()


@panel.inspect_command
def memsample(state: PoolSection, **_: Any) -> str | None:
    """How much memory the main process holds."""
    samples = state.memory_samples(1)
    return _shown(samples[-1]) if samples else None


@panel.inspect_command(args=[("samples", int)], signature="[N=10]")
def memdump(state: PoolSection, samples: int = 10, **_: Any) -> str:
    """The samples of memory that `memsample` took."""
    taken = [_shown(one) for one in state.memory_samples(max(1, samples))] or ["unknown"]
    return "\n".join(["- rss (sample):", *(f"-    > {one}," for one in taken), f"- rss (end): {taken[-1]}."])


@panel.inspect_command(
    args=[("num", int), ("max_depth", int), ("type", str)], signature="[NUM [DEPTH [TYPE]]]"
)
def objgraph(_state: NodeSection, num: int = 200, max_depth: int = 10, type: str = "Request") -> None:  # noqa: ARG001
    """A graph of objects in memory."""
    raise ImportError("objgraph is not available in workers of Umbel")


def _checked(n: int) -> int:
    if not 1 <= n <= GROW_MAX:
        raise ValueError(
            f"the number of child processes to add or remove, n, must be from 1 to {GROW_MAX}, not {n}"
        )
    return n


def _shown(mebibytes: float) -> str:
    return f"{mebibytes:.3f}MB"
