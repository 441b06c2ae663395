"""The atomic steps, as scripts that the server runs: each `.lua` file beside this one is one.

A script is called by its digest; a server that does not know it (a new one, or one whose scripts
were flushed) says so, and is then sent the text. What several scripts need stands in files of its
own (`refusals`, `marks`, `holding`, ...) and is put before their text: only what each needs, because
the server goes through all of it at every call. The first line names the lists of a queue (`lists.py`).
"""

import re
from dataclasses import dataclass
from functools import cache
from hashlib import sha1
from pathlib import Path

from umbel.brokers.redis.lists import DEFAULT_LISTS, Lists

_FOLDER = Path(__file__).parent
_PARTS = {
    "claim": ("marks", "holding", "claim"),
    "settle": ("marks", "results", "settle"),
    "store": ("results", "store"),
    "abandon": ("marks", "returning", "abandon"),
    "adopt": ("marks", "holding", "adopt"),
    "owners": ("marks", "holding", "returning", "owners"),
    "reconcile": ("marks", "returning", "reconcile"),
    "depths": ("marks", "depths"),
    "publish": ("marks", "publish"),
    "publish_once": ("publish_once",),
    "bury": ("marks", "bury"),
    "requeue": ("requeue",),
    "move": ("marks", "move"),
    "revoke": ("revoke",),
    "event_log": ("event_log",),
    "chord": ("marks", "chord"),
    "askers": ("askers",),
    "unique": ("unique",),
    "limit": ("marks", "limit"),
    "spend": ("spend",),
    "election": ("coordination", "election"),
    "lease": ("marks", "coordination", "lease"),
}


_CALL = re.compile(rb"(?:call|need|try)\([^)]*?'([A-Z]{2,})'")
_known: dict[str, "Script"] = {}


@dataclass(frozen=True, slots=True)
class Script:
    name: str
    text: bytes
    digest: str


@cache
def script(name: str, lists: Lists = DEFAULT_LISTS) -> Script:
    parts = [(_FOLDER / f"{part}.lua").read_bytes() for part in ("refusals", *_PARTS[name])]
    text = b"".join((lists.lua(), *parts))
    made = Script(name, text, sha1(text, usedforsecurity=False).hexdigest())
    _known[made.digest] = made
    return made


def command_at(digest: str, line: int) -> str:
    """What a script of ours asks the server for in this line; "" if it is not there."""
    found = _known.get(digest)
    lines = found.text.split(b"\n") if found is not None else []
    called = _CALL.search(lines[line - 1]) if 0 < line <= len(lines) else None
    return called[1].decode().lower() if called else ""
