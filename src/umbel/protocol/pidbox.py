"""Pidbox: one node's mailbox of control requests, and one caller's collection of the replies.

A request is sent to everyone; each node decides for itself whether it is meant, and says so when
it refuses: a caller whose clock is wrong, or who asks for what is not allowed, learns why instead
of waiting in vain. What is not meant for this node, or was carried out already, is passed over.

At most once: a request that wants replies carries a ticket, and a ticket is carried out once. The
last TICKETS_MAX tickets are remembered; a copy that comes later than so many others would run
again. A request without a ticket cannot be told from its copy.

Where a node has keys, what changes something must be signed (`trust.py`), and this is looked at before
anything else is. Who only looks needs no signature, but a wrong one is refused.

A caller has one deadline for everything. It is done earlier when every node that it waits for has
answered: those it named, or those that the first answers say are members.
"""

import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any, Protocol

from umbel.protocol.delivery.trust import Doubt, Doubted, Heard, Proof, Signed
from umbel.protocol.membership.opinions import Opinion, is_better
from umbel.protocol.value import Value

EVERY_UMBEL_NODE = "@v2"
"""A destination that every node of ours takes as its own name, and no Celery node does."""

TICKETS_MAX = 10_000
TICKET_CHARS_MAX = 255
EXPIRY_GRACE_S = 5.0
PATTERN_MAX = 1000
REPEATS_MAX = 4

_NOTHING: Mapping[str, Any] = {}


class ReplyTo(Value):
    exchange: str
    routing_key: str


class Request(Value):
    """One control command on its way. `expires_at` is Unix time; 0 means that it never does."""

    method: str
    arguments: Mapping[str, Any] = _NOTHING
    destination: tuple[str, ...] | None = None
    pattern: str | None = None
    matcher: str | None = None
    ticket: str = ""
    reply_to: ReplyTo | None = None
    expires_at: float = 0.0
    proof: Proof | None = None  # None: this node has no keys, and compared no signature


class Known(Value):
    """What a node says of a member: its state, and for how long it has been silent."""

    node: str
    state: str = "alive"
    silent_s: float = 0.0
    is_umbel: bool = True


class Reply(Value):
    """One node's answer. `members`: whom that node knows, where it says so.

    `total`: how many entries there are, where the list that came is only the first of them.
    """

    node: str
    value: Any
    ticket: str = ""
    members: tuple[Known, ...] = ()
    total: int | None = None


class Answers(Value):
    """What came of a request. `silent`: nodes that should have answered and did not.

    `lost`: those among the asked that the others have given up; nobody waited for them.
    """

    replies: Mapping[str, Any]
    silent: tuple[Known, ...] = ()
    unknown: tuple[str, ...] = ()  # answered, although no member list has them
    totals: Mapping[str, int] = _NOTHING  # of lists that were too long to send whole
    lost: tuple[Known, ...] = ()


class Malformed(Value):
    """Something arrived that is no request."""

    why: str


class Handle(Value):
    """Carry it out and answer."""

    request: Request


class Refused(Value):
    """Do not carry it out; answer with the reason."""

    request: Request
    why: str


class PassedOver(Value):
    """Not for this node, or done before: nothing is answered."""

    why: str


Event = Request | Malformed
Effect = Handle | Refused | PassedOver


class Forwarding(Protocol):
    """A clock, or an object that moves one."""

    def forward(self) -> object: ...


class Mailbox:
    """`refusal_of(method)` says why this node does not obey a command; "" means that it does.

    `changes(method)`: whether the command changes something. Where signatures are compared it must then be
    signed, and not before `since`, which moves when the clock is corrected.
    """

    def __init__(
        self,
        node: str,
        clock: Forwarding,
        *,
        refusal_of: Callable[[str], str],
        changes: Callable[[str], bool] = lambda _: True,
        since: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.received = self.malformed = self.refused = self.repeated = self.handled = self.distrusted = 0
        self._node = node
        self._clock = clock
        self._refusal_of = refusal_of
        self._changes = changes
        self._heard = Heard(since)
        self._tickets: OrderedDict[str, None] = OrderedDict()

    def step(self, event: Event, now: float) -> list[Effect]:
        """One message from the mailbox. `now` is Unix time, which is what requests expire by."""
        self.received += 1
        self._clock.forward()  # before any handler runs (P4)
        if isinstance(event, Malformed):
            self.malformed += 1
            return [PassedOver(event.why)]
        if len(event.ticket) > TICKET_CHARS_MAX:  # tickets are remembered
            self.malformed += 1
            return [PassedOver(f"the ticket has more than {TICKET_CHARS_MAX} characters")]
        problem = "" if event.destination is not None else pattern_problem(event.pattern, event.matcher)
        if not problem and not is_meant(event, self._node):
            return [PassedOver("for other nodes")]
        if (doubted := self._doubt(event, now)) is not None:
            self.distrusted += 1
            copied = doubted.doubt is Doubt.REPLAYED  # the first sender has its answer
            return [PassedOver(doubted.reason) if copied else Refused(event, doubted.reason)]
        if event.ticket and not self._is_new(event.ticket):
            self.repeated += 1
            return [PassedOver(f"the request with ticket {event.ticket} was handled before")]
        problem = problem or self._refusal_of(event.method) or _expired(event, now)
        if problem:
            self.refused += 1
            return [Refused(event, problem)]
        self.handled += 1
        return [Handle(event)]

    def _doubt(self, request: Request, now: float) -> Doubted | None:
        proof = request.proof
        if isinstance(proof, Signed):
            return self._heard.doubt(proof, now) if self._changes(request.method) else None
        if proof is None or (proof.doubt is Doubt.UNSIGNED and not self._changes(request.method)):
            return None
        return proof

    def _is_new(self, ticket: str) -> bool:
        if ticket in self._tickets:
            self._tickets.move_to_end(ticket)
            return False
        self._tickets[ticket] = None
        if len(self._tickets) > TICKETS_MAX:
            self._tickets.popitem(last=False)
        return True


def is_meant(request: Request, node: str) -> bool:
    """Whether a request is for this node. A pattern counts only where no destination is named."""
    if request.destination is not None:
        return node in request.destination or EVERY_UMBEL_NODE in request.destination
    if not request.pattern or not request.matcher:
        return True
    if request.matcher == "glob":
        return fnmatchcase(node, request.pattern)
    return re.match(request.pattern, node) is not None


def is_for_member(request: Request, known: Known) -> bool:
    """Whether a member, as somebody described it, is one of those who should answer."""
    named = request.destination
    if named is not None and EVERY_UMBEL_NODE in named:
        return known.is_umbel or known.node in named
    return is_meant(request, known.node)


def pattern_problem(pattern: str | None, matcher: str | None) -> str:
    """Why a pattern cannot be used; "" when it can."""
    if not pattern or not matcher:
        return ""
    if matcher not in ("glob", "pcre"):
        return f"the matcher {matcher!r} is unknown; use 'glob' or 'pcre'"
    if len(pattern) > PATTERN_MAX:
        return f"the pattern has {len(pattern)} characters; the limit is {PATTERN_MAX}"
    if matcher == "glob":
        return "" if pattern.count("*") <= REPEATS_MAX else f"a pattern may have at most {REPEATS_MAX} '*'"
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        return f"the pattern is not a valid regular expression: {error}"
    if is_costly(pattern):
        return f"the pattern may take too long: use at most {REPEATS_MAX} repeats, and none inside another"
    return ""


def is_costly(pattern: str) -> bool:
    """Whether matching could take long: several repeats multiply, nested ones have no bound.

    Counts `*`, `+`, `?`, `{` and groups with `|`, which each let the matcher choose; more than a
    few of them, or a group that holds one and is itself repeated, is too much.
    """
    choices, open_groups, closed_with_choice = 0, [False], False
    text = re.sub(r"\\.", "x", pattern, flags=re.DOTALL)
    text = re.sub(r"\[\^?\]?[^\]]*\]", "x", text)  # a class is one character
    text = text.replace("(?", "(")  # what kind of group it is does not matter here
    for character in text:
        repeats = character in "*+?{"
        if repeats and closed_with_choice:
            return True
        if repeats or character == "|":
            choices += repeats
            open_groups[-1] = True
        if character == "(":
            open_groups.append(False)
        closed_with_choice = character == ")" and len(open_groups) > 1 and open_groups.pop()
        if closed_with_choice:
            choices += 1
            open_groups[-1] = True
    return choices > REPEATS_MAX


def _expired(request: Request, now: float) -> str:
    late_s = now - request.expires_at
    if not request.expires_at or late_s <= EXPIRY_GRACE_S:
        return ""
    return f"the request had expired {late_s:.1f} s before it arrived, by this node's clock"


class Collection:
    """The replies to one request, until its deadline or until everyone has answered.

    A `limit` ends it at so many replies. Without one it waits for `expected`, the nodes that were
    named, or for the members that the replies name, or, where the broker counts the receivers of a
    request to all, for so many. `deadline` is on the clock that the caller keeps.
    """

    def __init__(
        self,
        *,
        deadline: float,
        expected: Iterable[str] = (),
        limit: int | None = None,
        matches: Callable[[Known], bool] = lambda _: True,
    ) -> None:
        self.deadline = deadline
        self.replies: dict[str, Any] = {}
        self._totals: dict[str, int] = {}
        self._expected = frozenset(expected) - {EVERY_UMBEL_NODE}
        self._limit = limit
        self._matches = matches
        self._members: dict[str, Known] = {}
        self._heard: int | None = None

    def heard_by(self, count: int) -> None:
        """So many nodes heard the request and may answer: nobody else is waited for."""
        self._heard = count

    def take(self, reply: Reply) -> None:
        self.replies[reply.node] = reply.value
        if reply.total is not None:
            self._totals[reply.node] = reply.total
        for member in reply.members:
            known = self._members.get(member.node)
            if known is None or is_better(_opinion(member), _opinion(known)):
                self._members[member.node] = member

    def is_complete(self) -> bool:
        if self._limit is not None:
            return len(self.replies) >= self._limit
        if self._heard is not None and len(self.replies) >= self._heard:
            return True
        awaited = self._awaited()
        return bool(awaited) and awaited <= self.replies.keys()

    def answers(self) -> Answers:
        awaited = self._awaited()
        silent = sorted(awaited - self.replies.keys())
        unknown = sorted(self.replies.keys() - awaited) if awaited else []
        return Answers(
            dict(self.replies),
            tuple(self._members.get(node, Known(node, "unknown")) for node in silent),
            tuple(unknown),
            dict(self._totals),
            self._lost(),
        )

    def _lost(self) -> tuple[Known, ...]:
        found = (known for known in self._members.values() if known.state == "lost" and self._matches(known))
        return tuple(sorted((one for one in found if one.node not in self.replies), key=lambda one: one.node))

    def _awaited(self) -> frozenset[str] | set[str]:
        if self._expected:
            return self._expected
        return {
            node
            for node, known in self._members.items()
            if known.state in ("alive", "suspect") and self._matches(known)
        }


def _opinion(known: Known) -> Opinion:
    return Opinion(known.state, known.silent_s)
