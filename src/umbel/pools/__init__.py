"""Where task code runs: child processes or this one, behind one interface."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from umbel.errors import BadSetting, nearest
from umbel.pools.interface import Pool, PoolSettings

if TYPE_CHECKING:
    from umbel.pools.prefork.server_process import StartedServer


def make_pool(name: str, settings: PoolSettings, first_server: "StartedServer | None" = None) -> Pool:
    """Return the pool of this name; raise BadSetting for an unknown name.

    `first_server` is for prefork, if a fork server was already started.
    """
    if first_server is not None:
        assert name == "prefork", "no other pool has one"
        return _prefork(settings, first_server)
    make = _POOLS.get(name)
    if make is None:
        near = nearest(name, _POOLS, cutoff=0.3)
        hint = f"did you mean {near!r}?" if near else f"known pools: {', '.join(_POOLS)}"
        raise BadSetting("pool", name, f"unknown pool; {hint}", source="the worker's options")
    return make(settings)


def _prefork(settings: PoolSettings, first_server: "StartedServer | None" = None) -> Pool:
    from umbel.pools.prefork.parent import PreforkPool

    return PreforkPool(settings, first_server)


def _solo(settings: PoolSettings) -> Pool:
    from umbel.pools.threads import SoloPool

    return SoloPool(settings)


def _threads(settings: PoolSettings) -> Pool:
    from umbel.pools.threads import ThreadsPool

    return ThreadsPool(settings)


def _asyncio(settings: PoolSettings) -> Pool:
    from umbel.pools.asyncio import AsyncioPool

    return AsyncioPool(settings)


def _gevent(settings: PoolSettings) -> Pool:
    from umbel.pools.gevent import GeventPool

    return GeventPool(settings)


# Each pool's module is imported on demand: a worker needs one of them, a client none.
_POOLS: dict[str, Callable[[PoolSettings], Pool]] = {
    "prefork": _prefork,
    "solo": _solo,
    "threads": _threads,
    "asyncio": _asyncio,
    "gevent": _gevent,
}
