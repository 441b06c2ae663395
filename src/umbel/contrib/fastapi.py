"""Umbel in FastAPI: the app's async client opens and closes with the site, and endpoints ask for it.

    site = FastAPI(lifespan=lifespan(tasks))

    @site.post("/orders/{number}")
    async def order(number: int, umbel: Umbel) -> str:
        return (await umbel.asend_task("shop.pack", [number])).id

Each process and event loop of a server has its own client, so it works with `--workers` and `--reload`.
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

STATE = "umbel"  # of `request.state`
FULL_RARER = 10  # full collections, after so many times more of the others
Lifespan = Callable[[FastAPI], AbstractAsyncContextManager[Mapping[str, Any] | None]]


def lifespan(
    app: App, own: Lifespan | None = None
) -> Callable[[FastAPI], AbstractAsyncContextManager[Mapping[str, Any]]]:
    """For `FastAPI(lifespan=...)`. A lifespan of your `own` runs inside: it may send tasks until its end.

    What the site has loaded by then is left out of later garbage collections, and full ones become rarer
    (`seldom_collected`).
    """

    @asynccontextmanager
    async def with_umbel(site: FastAPI) -> AsyncIterator[Mapping[str, Any]]:
        async with app, own(site) if own else nullcontext() as state:
            with seldom_collected():
                yield {**(state or {}), STATE: app}

    return with_umbel


@contextmanager
def seldom_collected() -> Iterator[None]:
    """Keep full garbage collections away from moments when many requests wait.

    A broker that stands still keeps requests waiting. Their objects make the collector go through
    everything again and again, which blocks the event loop for up to a tenth of a second each time.
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
    """The dependency: the app that the lifespan opened."""
    found = getattr(connection.state, STATE, None)
    if not isinstance(found, App):
        raise ConfigurationError(
            "no lifespan has opened an app of Umbel: write FastAPI(lifespan=lifespan(app)), "
            "and in tests `with TestClient(site)`"
        )
    return found


Umbel = Annotated[App, Depends(umbel_app)]
