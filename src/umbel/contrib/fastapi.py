"""Umbel in FastAPI: the app's async client opens and closes with the site, and endpoints depend on it.

    site = FastAPI(lifespan=lifespan(tasks))

    @site.post("/orders/{number}")
    async def order(number: int, umbel: Umbel) -> str:
        return (await umbel.asend_task("shop.pack", [number])).id

Each process and event loop of a server has a separate client, so it works with `--workers` and `--reload`.
"""

import gc
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, nullcontext
from typing import Annotated, Any

from fastapi import Depends, FastAPI
from fastapi.requests import HTTPConnection

from umbel.app.app import App
from umbel.errors import ConfigurationError

__all__ = ["Umbel", "lifespan", "umbel_app"]

STATE = "umbel"  # the attribute of `request.state`
FULL_RARER = 10  # how many times rarer full collections become
Lifespan = Callable[[FastAPI], AbstractAsyncContextManager[Mapping[str, Any] | None]]


def lifespan(
    app: App, own: Lifespan | None = None
) -> Callable[[FastAPI], AbstractAsyncContextManager[Mapping[str, Any]]]:
    """For `FastAPI(lifespan=...)`. A lifespan of your `own` runs inside: it may send tasks until its end.

    Objects that the site has loaded by then are excluded from later garbage collections, and full collections
    become rarer (`seldom_collected`).
    """

    @asynccontextmanager
    async def with_umbel(site: FastAPI) -> AsyncIterator[Mapping[str, Any]]:
        async with app, own(site) if own else nullcontext() as state:
            with seldom_collected():
                yield {**(state or {}), STATE: app}

    return with_umbel


@contextmanager
def seldom_collected() -> Iterator[None]:
    """Avoid full garbage collections while many requests wait.

    An unresponsive broker keeps requests waiting. Their objects make the collector go through everything
    again and again, which blocks the event loop for up to a tenth of a second each time.
    """
    young, middle, old = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(young, middle, old * FULL_RARER)
    try:
        yield
    finally:
        gc.set_threshold(young, middle, old)
        gc.unfreeze()


def umbel_app(connection: HTTPConnection) -> App:
    """The dependency: the app that the lifespan opened. ConfigurationError if there is none."""
    found = getattr(connection.state, STATE, None)
    if not isinstance(found, App):
        raise ConfigurationError(
            "no lifespan has opened an app of Umbel: write FastAPI(lifespan=lifespan(app)), "
            "and in tests `with TestClient(site)`"
        )
    return found


Umbel = Annotated[App, Depends(umbel_app)]
