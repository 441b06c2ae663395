"""Journal: what happened in the worker's processes, line by line, in lists that the client reads."""

import json
import os
from functools import cache
from typing import Any

from redis import Redis


@cache
def store() -> Any:
    return Redis.from_url(os.environ["JOURNAL_URL"], decode_responses=True)


def note(key: str | None, *line: Any) -> None:
    """Append to the list `key`."""
    store().rpush(f"journal:{key}", json.dumps(line, default=repr))


def note_once(key: str, *line: Any) -> None:
    """The same, with a connection that is closed: before a fork none may be open."""
    with Redis.from_url(os.environ["JOURNAL_URL"]) as client:
        client.rpush(f"journal:{key}", json.dumps(line, default=repr))


def wait_at(gate: str, timeout_s: float = 60.0) -> bool:
    """Wait until the client opens the gate, by pushing to it. True when it did."""
    return store().blpop([f"gate:{gate}"], timeout=timeout_s) is not None
