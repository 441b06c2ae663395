"""SavedGroups: what `app.GroupResult` is, so that `app.GroupResult.restore(id)` needs no app."""

from collections.abc import Sequence
from typing import Any

from umbel.app.results import AsyncResult, GroupResult, ResultApp


class SavedGroups:
    def __init__(self, app: ResultApp) -> None:
        self._app = app

    def __call__(self, group_id: str, results: Sequence[AsyncResult[Any] | GroupResult]) -> GroupResult:
        return GroupResult(group_id, results, app=self._app)

    def restore(self, group_id: str) -> GroupResult | None:
        return GroupResult.restore(group_id, app=self._app)
