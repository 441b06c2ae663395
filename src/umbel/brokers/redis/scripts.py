"""Scripts: the atomic steps that the server runs, from the `.lua` files in this folder.

Each file has one subject, with sections under headings such as

    -- ---- part buckets -------------------
    -- ---- script purge (with messages, buckets) ---

The text of a script is its section, after the parts that it names and the parts that these name. It has no
other parts, because the server runs all of the text at every call, and no lines of comments. In front of it
are the names that Python and Lua share: the prefix of all keys, the lists of a queue, limits, and for
`settle`, whose arguments have many sections, the place of each argument.

A script is called by its digest. A server that does not know the digest (a new server, or one whose scripts
were flushed) says so, and is then sent the text.

A queue has one list for each step of priority. Celery's transport options `priority_steps` and `sep` name
them, and all programs that share a queue must agree on both.
"""

import re
from bisect import bisect
from dataclasses import dataclass
from functools import cache
from hashlib import sha1
from itertools import chain
from pathlib import Path

from umbel.brokers.interface.connection import DEFAULT_PRIORITY_STEPS, DEFAULT_SEP
from umbel.brokers.rules import AHEAD_MAX, AHEAD_S, DEAD_LETTERS_MAX, PASSED_OVER_MAX
from umbel.protocol.leadership.coordination import ATTEMPTS_MAX, RETENTION_S

# ---- the lists of a queue --------------------------------------------------------------------------

PRIORITY_MAX = 9


@dataclass(frozen=True, slots=True)
class Lists:
    """The steps of priority, beginning with 0 and rising; 0 is served first."""

    steps: tuple[int, ...] = DEFAULT_PRIORITY_STEPS
    sep: str = DEFAULT_SEP

    @property
    def suffixes(self) -> list[str]:
        """What follows the queue's name in the name of each list, in the order in which they are served."""
        return [self.suffix(step) for step in self.steps]

    def suffix(self, step: int) -> str:
        """What follows the queue's name in the list of this step."""
        return f"{self.sep}{step}" if step else ""

    def step_of(self, priority: int) -> int:
        """The step whose list has messages of this priority: the highest step that is not above it."""
        return self.steps[bisect(self.steps, min(max(priority, 0), PRIORITY_MAX)) - 1]


def steps_problem(steps: tuple[int, ...]) -> str:
    """Why these steps cannot be used; "" if they can."""
    if not steps or steps[0] != 0 or list(steps) != sorted(set(steps)):
        return (
            f"priority_steps is {list(steps)!r}: write rising numbers that begin with 0, as in [0, 3, 6, 9]"
        )
    return ""


DEFAULT_LISTS = Lists()


# ---- names that Python and Lua share ---------------------------------------------------------------

SETTLE = ("owner", "epoch", "check", "ttl")
SETTLE_SECTIONS = {  # the entries of each have so many arguments
    "done": 1,
    "results": 2,
    "lists": 3,
    "envelopes": 1,
    "delayed": 4,
    "others": 4,
    "apart": 1,
    "marks": 1,
}
"""The arguments of `settle`: these, then each section, its count first (`verdicts.py`, `settle.lua`)."""

_CONSTANTS = {
    "AHEAD_S": AHEAD_S,
    "AHEAD_MAX": AHEAD_MAX,
    "PASSED_OVER_MAX": PASSED_OVER_MAX,
    "DEAD_LETTERS_MAX": DEAD_LETTERS_MAX,
    "ATTEMPTS_MAX": ATTEMPTS_MAX,
    "RETENTION_S": round(RETENTION_S),
}


def _beginning(lists: Lists, prefix: str) -> str:
    """The first lines of every script."""
    suffixes = ", ".join(map(_quoted, lists.suffixes))
    return (
        f"local PREFIX, SEP, SUFFIXES = {_quoted(prefix)}, {_quoted(lists.sep)}, {{{suffixes}}}\n"
        f"local {', '.join(_CONSTANTS)} = {', '.join(map(str, _CONSTANTS.values()))}\n"
    )


def _settle_arguments() -> str:
    """Lines of Lua that define the arguments of `settle`; of each section its first place and its count."""
    lines = [f"local {', '.join(SETTLE)} = unpack(ARGV, 1, {len(SETTLE)})", f"local at = {len(SETTLE) + 1}"]
    for name, width in SETTLE_SECTIONS.items():
        lines.append(f"local {name}, {name}_count = at + 1, tonumber(ARGV[at])")
        lines.append(f"at = {name} + {width} * {name}_count")
    return "\n".join([*lines, ""])


def _quoted(text: str) -> str:
    """Any bytes as a string literal of Lua."""
    return "'" + "".join(f"\\{byte:03d}" for byte in text.encode()) + "'"


# ---- scripts ---------------------------------------------------------------------------------------

_FOLDER = Path(__file__).parent
_HEADING = re.compile(r"^-- ---- (?:part|script) (\w+)(?: \(with ([\w, ]+)\))? -+\n", re.MULTILINE)
_COMMENT = re.compile(r"^ *--.*\n", re.MULTILINE)
_CALL = re.compile(rb"(?:call|need|try)\([^)]*?'([A-Z]{2,})'")
_known: dict[str, "Script"] = {}


@dataclass(frozen=True, slots=True)
class Script:
    """The whole text of a script, and the digest by which the server knows it."""

    name: str
    text: bytes
    digest: str


@cache
def script(name: str, lists: Lists = DEFAULT_LISTS, prefix: str = "") -> Script:
    """The script of this name for these lists and this prefix of keys; built once."""
    found = sections()
    names = dict.fromkeys(("refusals", *_with_parts(name)))
    arguments = _settle_arguments() if name == "settle" else ""
    parts = (found[part][1] for part in names)
    text = _COMMENT.sub("", "".join((_beginning(lists, prefix), arguments, *parts))).encode()
    made = Script(name, text, sha1(text, usedforsecurity=False).hexdigest())
    _known[made.digest] = made
    return made


@cache
def sections() -> dict[str, tuple[list[str], str]]:
    """The parts and scripts of the files, by name: the parts that each names, and its text."""
    found: dict[str, tuple[list[str], str]] = {}
    for file in _FOLDER.glob("*.lua"):
        _, *split = _HEADING.split(file.read_text())
        for name, named, text in zip(split[::3], split[1::3], split[2::3], strict=True):
            found[name] = (named.split(", ") if named else [], text)
    return found


def _with_parts(name: str) -> list[str]:
    return [*chain.from_iterable(map(_with_parts, sections()[name][0])), name]


def command_at(digest: str, line: int) -> str:
    """The command that a script calls in this line; "" if there is none."""
    found = _known.get(digest)
    lines = found.text.split(b"\n") if found is not None else []
    called = _CALL.search(lines[line - 1]) if 0 < line <= len(lines) else None
    return called[1].decode().lower() if called else ""
