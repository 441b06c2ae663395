"""The atomic steps, as scripts that the server runs: each `.lua` file beside this one is one.

A script is called by its digest; a server that does not know it (a new one, or one whose scripts
were flushed) says so, and is then sent the text. What several scripts need stands in files of its
own (`refusals`, `marks`, `results`, `coordination`) and is put before their text.
"""

from dataclasses import dataclass
from functools import cache
from hashlib import sha1
from importlib.resources import files

_PARTS = {
    "claim": ("marks", "claim"),
    "settle": ("marks", "results", "settle"),
    "store": ("results", "store"),
    "abandon": ("marks", "abandon"),
    "adopt": ("marks", "adopt"),
    "owners": ("marks", "owners"),
    "reconcile": ("marks", "reconcile"),
    "depths": ("marks", "depths"),
    "publish": ("marks", "publish"),
    "bury": ("marks", "bury"),
    "requeue": ("requeue",),
    "revoke": ("revoke",),
    "event_log": ("event_log",),
    "chord": ("marks", "chord"),
    "askers": ("askers",),
    "unique": ("unique",),
    "election": ("coordination", "election"),
    "lease": ("marks", "coordination", "lease"),
}


@dataclass(frozen=True, slots=True)
class Script:
    name: str
    text: bytes
    digest: str


@cache
def script(name: str) -> Script:
    folder = files("umbel.brokers.redis")
    text = b"".join(folder.joinpath(f"{part}.lua").read_bytes() for part in ("refusals", *_PARTS[name]))
    return Script(name, text, sha1(text, usedforsecurity=False).hexdigest())
