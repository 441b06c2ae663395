"""Rights: which one a Redis user is missing, read from how the server says no.

It names a command outside of scripts. Of a key or a channel, and inside a script of Redis 7.0, it says that
one is missing and not which; there the line of the script tells, or what it needed the key for.
"""

import re
from dataclasses import dataclass

from umbel.brokers.redis.scripts import command_at

# Redis 6.2 and 7.0, and the shorter words of Redis 7.2 and Valkey.
_COMMAND = re.compile(r"no permissions to run the '([^']+)' command|can't run this command")
_KEY = re.compile(r"access (?:a key|(?:at least )?one of the keys)")
_CHANNEL = re.compile(r"access (?:a channel|(?:at least )?one of the channels)|publish to the channel")
_IN_SCRIPT = re.compile(r"script: ([0-9a-f]{40}), on @user_script:(\d+)")
_USED = re.compile(r"the key '(.*)' cannot be used(?: by ([A-Z]+))?: ")
_ALL = "grant what docs/brokers.md lists; ACL LOG on the server says which"


@dataclass(frozen=True, slots=True)
class MissingRight:
    words: str
    is_key: bool = False


def missing_right(text: str, user: str) -> MissingRight | None:
    """What the user may not do and how that is granted; None where this is another error."""
    used = _USED.search(text)
    key, by = (used[1], (used[2] or "").lower()) if used else ("", "")
    if found := _COMMAND.search(text):
        place = _IN_SCRIPT.search(text)
        command = found[1] or by or (command_at(place[1], int(place[2])) if place else "")
        if not command:
            return MissingRight(f"a command that a script needs to the user {user!r}; {_ALL}")
        return _missing(f"the command {command!r}", user, f"+{command}")
    if _KEY.search(text):
        return _missing(f"the key {key!r}" if key else "a key", user, f"~{key or '*'}", is_key=True)
    return _missing("a channel", user, "&*") if _CHANNEL.search(text) else None


def _missing(what: str, user: str, right: str, *, is_key: bool = False) -> MissingRight:
    remedy = f"grant it with ACL SETUSER {user} {right}, or all that docs/brokers.md lists"
    return MissingRight(f"{what} to the user {user!r}; {remedy}", is_key)
