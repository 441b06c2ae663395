"""What the dashboard does to its saved views: save and delete, as fields of an `ActionResult`."""

import asyncio
from sqlite3 import Error as FileError
from time import time
from typing import Any, Protocol

import msgspec

from umbel.web.actions import DeleteView, SaveView
from umbel.web.problems import Refused
from umbel.web.saved_views import VIEW_BYTES_MAX, VIEWS_MAX, SavedView

ViewAction = SaveView | DeleteView


class ViewStore(Protocol):
    def save_view(self, view: SavedView) -> bool: ...
    def delete_view(self, name: str) -> bool: ...


def check_view(action: ViewAction) -> None:
    if action.nodes:
        raise Refused(
            422, "Unprocessable", "saved views are kept by the dashboard, not by workers; leave out `nodes`"
        )
    if not action.view.strip() or not action.view.isprintable():
        raise Refused(422, "Unprocessable", "a view needs a name of letters, digits, signs and plain spaces")
    size = len(msgspec.json.encode(action))
    if size > VIEW_BYTES_MAX:
        detail = f"the view has {size:,} bytes, of {VIEW_BYTES_MAX:,} at most; shorten what it searches for"
        raise Refused(422, "Unprocessable", detail)


async def change_views(store: ViewStore, action: ViewAction) -> dict[str, Any]:
    try:
        if isinstance(action, SaveView):
            return await asyncio.to_thread(_save, store, action)
        return await asyncio.to_thread(_delete, store, action.view)
    except FileError as error:
        return {"problem": f"the dashboard's file cannot be written: {error}"}


def _save(store: ViewStore, action: SaveView) -> dict[str, Any]:
    view = SavedView(
        name=action.view,
        match=action.match,
        order=action.order,
        columns=list(dict.fromkeys(action.columns)),
        saved_at=time(),
    )
    if store.save_view(view):
        return {"count": 1}
    return {"problem": f"there are {VIEWS_MAX} saved views already; delete some first"}


def _delete(store: ViewStore, name: str) -> dict[str, Any]:
    if store.delete_view(name):
        return {"count": 1}
    return {"refused": {name: "there is no such view"}}
