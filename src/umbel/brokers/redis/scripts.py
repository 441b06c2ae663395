"""Scripts: the atomic steps that the server runs; each `.lua` file in this folder is one.

A script is called by its digest. A server that does not know it (a new one, or one whose scripts were
flushed) answers so, and is then sent the text. Parts that several scripts share are separate files
(`refusals`, `marks`, `holding`, ...), put in front of their text: only those that a script needs, because the
server reads all of it at every call. The first line of each script names the lists of a queue.

A queue has one list for each step of priority. Celery's transport options `priority_steps` and `sep` name
them, and all programs that share a queue must agree on both.
"""

import re
from bisect import bisect
from dataclasses import dataclass
from functools import cache
from hashlib import sha1
from pathlib import Path

from umbel.brokers.interface.connection import DEFAULT_PRIORITY_STEPS, DEFAULT_SEP

# ---- the lists of a queue --------------------------------------------------------------------------
#
# One for each step of priority, and what their names end in.
#
# Celery's transport options `priority_steps` and `sep` name them, and all programs that share a queue must
# agree. The scripts get the same names in front of their text, so they are defined only here.

PRIORITY_MAX = 9


@dataclass(frozen=True, slots=True)
class Lists:
    """The steps of priority, beginning with 0 and rising; 0 is served first."""

    steps: tuple[int, ...] = DEFAULT_PRIORITY_STEPS
    sep: str = DEFAULT_SEP

    @property
    def suffixes(self) -> list[str]:
        """What follows the queue's name in each list, in the order in which they are served."""
        return [self.suffix(step) for step in self.steps]

    def suffix(self, step: int) -> str:
        """What follows the queue's name in the list of this step."""
        return f"{self.sep}{step}" if step else ""

    def step_of(self, priority: int) -> int:
        """The step whose list holds a priority: the highest step that is not above it."""
        return self.steps[bisect(self.steps, min(max(priority, 0), PRIORITY_MAX)) - 1]

    def lua(self) -> bytes:
        """The separator and suffixes as the first line of a script."""
        suffixes = ", ".join(map(_quoted, self.suffixes))
        return f"local SEP, SUFFIXES = {_quoted(self.sep)}, {{{suffixes}}}\n".encode()


def steps_problem(steps: tuple[int, ...]) -> str:
    """Why these steps cannot be used; "" if they can."""
    if not steps or steps[0] != 0 or list(steps) != sorted(set(steps)):
        return (
            f"priority_steps is {list(steps)!r}: write rising numbers that begin with 0, as in [0, 3, 6, 9]"
        )
    return ""


def _quoted(text: str) -> str:
    """Any bytes as a string literal of Lua."""
    return "'" + "".join(f"\\{byte:03d}" for byte in text.encode()) + "'"


DEFAULT_LISTS = Lists()


# ---- scripts ---------------------------------------------------------------------------------------
#
# The atomic steps that the server runs; each `.lua` file in this folder is one.
#
# A script is called by its digest. A server that does not know it (a new one, or one whose scripts were
# flushed) answers so, and is then sent the text. Parts that several scripts share are separate files
# (`refusals`, `marks`, `holding`, ...), put in front of their text: only those that a script needs, because
# the server reads all of it at every call. The first line names the lists of a queue (above).

_FOLDER = Path(__file__).parent
_MARKS = ("holds", "marks")
_PARTS = {
    "claim": (*_MARKS, "holding", "claim"),
    "settle": (*_MARKS, "results", "settle"),
    "store": ("results", "store"),
    "abandon": (*_MARKS, "returning", "abandon"),
    "adopt": (*_MARKS, "holding", "adopt"),
    "owners": (*_MARKS, "holding", "returning", "owners"),
    "reconcile": (*_MARKS, "returning", "reconcile"),
    "depths": (*_MARKS, "depths"),
    "publish": (*_MARKS, "publish"),
    "publish_once": ("publish_once",),
    "bury": (*_MARKS, "bury"),
    "requeue": ("requeue",),
    "move": (*_MARKS, "move"),
    "revoke": ("revoke",),
    "event_log": ("event_log",),
    "chord": (*_MARKS, "chord"),
    "askers": ("askers",),
    "unique": ("holds", "unique"),
    "limit": (*_MARKS, "buckets", "limit"),
    "purge": (*_MARKS, "buckets", "purge"),
    "spend": ("spend",),
    "election": ("coordination", "election"),
    "lease": (*_MARKS, "coordination", "lease"),
}


_CALL = re.compile(rb"(?:call|need|try)\([^)]*?'([A-Z]{2,})'")
_known: dict[str, "Script"] = {}


@dataclass(frozen=True, slots=True)
class Script:
    """The whole text of a script, and the digest by which the server knows it."""

    name: str
    text: bytes
    digest: str


@cache
def script(name: str, lists: Lists = DEFAULT_LISTS) -> Script:
    """The script of this name for these lists; built once."""
    parts = [(_FOLDER / f"{part}.lua").read_bytes() for part in ("refusals", *_PARTS[name])]
    text = b"".join((lists.lua(), *parts))
    made = Script(name, text, sha1(text, usedforsecurity=False).hexdigest())
    _known[made.digest] = made
    return made


def command_at(digest: str, line: int) -> str:
    """The command that a script calls in this line; "" if there is none."""
    found = _known.get(digest)
    lines = found.text.split(b"\n") if found is not None else []
    called = _CALL.search(lines[line - 1]) if 0 < line <= len(lines) else None
    return called[1].decode().lower() if called else ""
