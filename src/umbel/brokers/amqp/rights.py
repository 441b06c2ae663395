"""Rights: which one a RabbitMQ user is missing, read from how the server says no.

A user may configure, write and read what three patterns match. RabbitMQ 3.10 names the queue or exchange and
not the right; the method that it refused tells. Some of these names serve all that we do, so that nothing
works without them. The others are queues and exchanges of tasks, and their refusal concerns them alone.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from shlex import quote

from umbel.brokers.amqp.frames import Method
from umbel.brokers.amqp.location import Location
from umbel.brokers.amqp.topology import CONTROL_EXCHANGE, EVENT_EXCHANGE

ACCESS_REFUSED = 403
_REFUSED = re.compile(
    r"(?:(configure|write|read) )?access to (queue|exchange|topic) '(.*?)' in .* refused for user"
)
CONFIGURE, _WRITE, _READ = "configure", "write to", "read from"
_RIGHTS = {"configure": CONFIGURE, "write": _WRITE, "read": _READ}
# A queue that is bound is written to, its exchange is read from.
_OF_QUEUES: Mapping[int, str] = {
    Method.QUEUE_DECLARE: CONFIGURE,
    Method.QUEUE_BIND: _WRITE,
    Method.QUEUE_UNBIND: _WRITE,
    Method.QUEUE_PURGE: _READ,
    Method.QUEUE_DELETE: CONFIGURE,
    Method.BASIC_CONSUME: _READ,
    Method.BASIC_GET: _READ,
}
_OF_EXCHANGES: Mapping[int, str] = {
    Method.EXCHANGE_DECLARE: CONFIGURE,
    Method.QUEUE_DECLARE: _WRITE,  # that of its dead letters
    Method.QUEUE_BIND: _READ,
    Method.QUEUE_UNBIND: _READ,
    Method.BASIC_PUBLISH: _WRITE,
}
_SHARED = re.compile(
    r"amq\.default|umbel\.(?!delay\.).*"
    rf"|{re.escape(EVENT_EXCHANGE)}(\..*)?|(.*\.)?{re.escape(CONTROL_EXCHANGE)}"
)
_ALL = "'.*' '.*' '.*'"


@dataclass(frozen=True, slots=True)
class MissingRight:
    right: str
    words: str
    is_shared: bool  # nothing works without it


def missing_right(location: Location, text: str, method: int = 0) -> MissingRight:
    """What the user may not do and how that is granted, from the words of a refusal with code 403."""
    found = _REFUSED.search(text)
    stated, kind, name = found.groups() if found else ("", "", "")
    right = _RIGHTS.get(stated) or (_OF_QUEUES if kind == "queue" else _OF_EXCHANGES).get(method, "use")
    what = f"{right} the {kind} {name!r}" if found else f"do this ({text})"
    where = f"in the virtual host {location.vhost!r}"
    words = f"the user {location.user!r} may not {what} {where}; {granting(location)}"
    return MissingRight(right, words, is_shared=bool(_SHARED.fullmatch(name)))


def granting(location: Location) -> str:
    """The command that grants what is missing; it sets all three patterns at once."""
    command = f"rabbitmqctl set_permissions -p {quote(location.vhost)} {quote(location.user)} {_ALL}"
    return f"grant it with {command}, or with the patterns that docs/brokers.md lists"
