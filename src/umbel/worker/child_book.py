"""ChildBook: the child processes of a pool: which there are, and how often each was replaced."""

from collections.abc import Mapping
from typing import Any


class ChildBook:
    """By place in the pool, of which there are as many as it was ever large."""

    def __init__(self) -> None:
        self.pids: dict[int, int] = {}
        self.restarts: dict[int, int] = {}

    def note(self, what: str, fields: Mapping[str, Any]) -> None:
        child, pid = fields.get("child"), fields.get("pid")
        if not isinstance(child, int) or not isinstance(pid, int):
            return
        if what == "started":
            self.restarts[child] = self.restarts.get(child, -1) + 1
            self.pids[child] = pid
        elif what in ("ended", "died") and self.pids.get(child) == pid:
            del self.pids[child]
