"""Umbel in FastAPI: the app's async client opens and closes with the site; endpoints get it as a dependency.

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
FULL_RARER = 10  # the factor by which full collections become rarer
Lifespan = Callable[[FastAPI], AbstractAsyncContextManager[Mapping[str, Any] | None]]


def lifespan(
    app: App, own: Lifespan | None = None
) -> Callable[[FastAPI], AbstractAsyncContextManager[Mapping[str, Any]]]:
    """The value for `FastAPI(lifespan=...)`. Your `own` lifespan runs inside it, and may send tasks.

    Objects that are loaded before the site starts are excluded from garbage collection, and full collections
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

    While the broker does not answer, requests wait, and their objects trigger one full collection after the
    other. Each blocks the event loop for up to a tenth of a second.
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
    """The dependency: the app that the lifespan opened; ConfigurationError if there is none."""
    found = getattr(connection.state, STATE, None)
    if not isinstance(found, App):
        raise ConfigurationError(
            "no lifespan has opened an app of Umbel: write FastAPI(lifespan=lifespan(app)), "
            "and in tests `with TestClient(site)`"
        )
    return found


Umbel = Annotated[App, Depends(umbel_app)]
