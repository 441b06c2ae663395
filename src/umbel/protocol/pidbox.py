"""Control requests: a node's mailbox of requests (pidbox), and a caller's collection of the replies.

A request goes to every node. Each node decides whether the request is addressed to it, and replies with an
error when it refuses. The caller does not know how many nodes will reply: it stops at a limit, at a deadline,
or when all members that it knows of have replied. If nodes disagree about another node's state, `Opinion`s
are ranked: a newer run first, then a recent sign of life, then the worse state.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from umbel.patterns import BadPattern, expression_of, glob_of
from umbel.protocol.delivery.trust import Doubt, Doubted, Proof, SeenRequests, Signed
from umbel.protocol.machine import Value

# ---- opinions --------------------------------------------------------------------------------------
#
# A node that recently received an event of another node has evidence that this node was online, whatever
# other nodes report. Without such evidence, "alive" only means that the reporter has not noticed anything
# yet: it may have been partitioned a moment ago, and knows least. Then the worst state counts. A report about
# a newer run of the node counts before a report about an older run.
#
# Limit: if a whole part of the cluster is partitioned from the caller, only the other part replies, with its
# view.

HEARTBEAT_S = 2.0
FRESH_BEATS = 1.5
_GRAVITY = {"alive": 0, "suspect": 1, "lost": 2, "left": 3}


class Opinion(Value):
    """One node's report about another: its state, and how long it has been silent."""

    state: str
    silent_s: float
    incarnation: int = 0
    freq_s: float = HEARTBEAT_S


def is_better(opinion: Opinion, other: Opinion) -> bool:
    """Return whether the first of two opinions about one node is more reliable than the second."""
    return _weight(opinion) > _weight(other)


def _weight(opinion: Opinion) -> tuple[int, bool, int, float]:
    is_fresh = opinion.silent_s <= FRESH_BEATS * max(opinion.freq_s, HEARTBEAT_S)
    gravity = 0 if is_fresh else _GRAVITY.get(opinion.state, 0)
    return opinion.incarnation, is_fresh, gravity, -opinion.silent_s


# ---- pidbox ----------------------------------------------------------------------------------------
#
# A node that refuses a request replies with the reason. So a caller whose clock is wrong, or that asks for
# something not allowed, learns why instead of waiting in vain. A request that is for other nodes, or was
# handled before, gets no reply.
#
# At most once: a request that expects replies carries a ticket, and a ticket is handled once. The last
# TICKETS_MAX tickets are remembered; a copy that arrives after that many others would run again. A request
# without a ticket cannot be distinguished from its copy.
#
# If a node has keys, commands that change something must be signed (`trust.py`), which is checked before the
# pattern. Commands that only read need no signature, but a wrong signature is refused. A pattern is matched
# in linear time (`patterns.py`), because anyone who can write to the broker can send a pattern.
#
# A caller waits for replies for the stated time, counted from when its request was sent. It finishes earlier
# when every expected node has replied: the nodes that it named, those that the first replies list as members,
# or as many as the broker counted. If no time is stated, it waits ANSWERS_S if a node is known to listen,
# because a worker on a busy machine may be slow. If it is unknown which nodes will reply, it waits until no
# reply has arrived for QUIET_S.

EVERY_UMBEL_NODE = "@v2"
"""A destination that every Umbel node accepts as its name, and no Celery node does."""

TICKETS_MAX = 10_000
TICKET_CHARS_MAX = 255
EXPIRY_GRACE_S = 5.0
ANSWERS_S, QUIET_S = 5.0, 1.0
PATTERN_MAX = 1000

_NOTHING: Mapping[str, Any] = {}


class ReplyTo(Value):
    """The exchange and routing key to which replies are sent."""

    exchange: str
    routing_key: str


class Request(Value):
    """One control command in transit. `expires_at` is Unix time; 0 means that it never expires."""

    method: str
    arguments: Mapping[str, Any] = _NOTHING
    destination: tuple[str, ...] | None = None
    pattern: str | None = None
    matcher: str | None = None
    ticket: str = ""
    reply_to: ReplyTo | None = None
    expires_at: float = 0.0
    proof: Proof | None = None  # None: this node has no keys and verified no signature


class MemberReport(Value):
    """A node's report about a member: its state, and how long it has been silent."""

    node: str
    state: str = "alive"
    silent_s: float = 0.0
    is_umbel: bool = True


class Reply(Value):
    """One node's reply. `members`: the members that the node lists, if it does.

    `total`: the number of entries, if the list in the reply was truncated.
    """

    node: str
    value: Any
    ticket: str = ""
    members: tuple[MemberReport, ...] = ()
    total: int | None = None


class Answers(Value):
    """The outcome of a request. `silent`: nodes that should have replied and did not.

    `lost`: requested nodes that other nodes declared lost; the caller did not wait for them.
    """

    replies: Mapping[str, Any]
    silent: tuple[MemberReport, ...] = ()
    unknown: tuple[str, ...] = ()  # nodes that replied although no member list names them
    totals: Mapping[str, int] = _NOTHING  # by node: the full length of a truncated list
    lost: tuple[MemberReport, ...] = ()

    @property
    def refusals(self) -> dict[str, str]:
        """Return the reasons why nodes refused the request or failed, by node."""
        found = {node: error_of(reply) for node, reply in self.replies.items()}
        return {node: why for node, why in found.items() if why is not None}


def error_of(reply: Any) -> str | None:
    """Return the error in a node's reply; None if there is none."""
    return str(reply["error"]) if isinstance(reply, Mapping) and "error" in reply else None


class Malformed(Value):
    """A message arrived that is not a request."""

    why: str


class Handle(Value):
    """Run the command and reply."""

    request: Request


class Refused(Value):
    """Do not run the command; reply with the reason."""

    request: Request
    why: str


class RequestIgnored(Value):
    """Do nothing and send no reply: the request is for another node, or was handled before."""

    why: str


Event = Request | Malformed
Effect = Handle | Refused | RequestIgnored


class Mailbox:
    """Decides which requests this node handles; each is handled at most once.

    `refusal_of(method)` returns why this node refuses a command; "" means that it runs it. `changes(method)`:
    whether the command changes something. If signatures are verified, such a command must be signed, and not
    before `since`, which moves when the clock is corrected.
    """

    def __init__(
        self,
        node: str,
        forward_clock: Callable[[], object],
        *,
        refusal_of: Callable[[str], str],
        changes: Callable[[str], bool] = lambda _: True,
        since: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.received = self.malformed = self.refused = self.repeated = self.handled = self.distrusted = 0
        self._node = node
        self._forward_clock = forward_clock
        self._refusal_of = refusal_of
        self._changes = changes
        self._heard = SeenRequests(since)
        self._tickets: OrderedDict[str, None] = OrderedDict()

    def step(self, event: Event, now: float) -> list[Effect]:
        """Decide about one message from the mailbox. `now` is Unix time, like the expiry of requests."""
        self.received += 1
        self._forward_clock()  # before any handler runs (rule P4)
        if isinstance(event, Malformed):
            self.malformed += 1
            return [RequestIgnored(event.why)]
        if len(event.ticket) > TICKET_CHARS_MAX:  # tickets are stored, so their length is limited
            self.malformed += 1
            return [RequestIgnored(f"the ticket has more than {TICKET_CHARS_MAX} characters")]
        if event.destination is not None and not _is_named(event.destination, self._node):
            return [RequestIgnored("for other nodes")]
        if (doubted := self._doubt(event, now)) is not None:
            self.distrusted += 1
            copied = doubted.doubt is Doubt.REPLAYED  # the original request was answered
            return [RequestIgnored(doubted.reason) if copied else Refused(event, doubted.reason)]
        problem = pattern_problem(event)
        if not problem and not is_meant(event, self._node):
            return [RequestIgnored("for other nodes")]
        if event.ticket and not self._is_new(event.ticket):
            self.repeated += 1
            return [RequestIgnored(f"the request with ticket {event.ticket} was handled before")]
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
    """Return whether a request without a `pattern_problem` is addressed to this node."""
    if request.destination is not None:
        return _is_named(request.destination, node)
    if not request.pattern or not request.matcher:
        return True
    return MATCHERS[request.matcher](request.pattern)(node)


def is_for_member(request: Request, known: MemberReport) -> bool:
    """Return whether a member, as another node describes it, should reply."""
    named = request.destination
    if named is not None and EVERY_UMBEL_NODE in named:
        return known.is_umbel or known.node in named
    return is_meant(request, known.node)


def pattern_problem(request: Request) -> str:
    """Return why the request's pattern is unusable; "" if it is usable, or if destinations are named."""
    pattern, matcher = request.pattern, request.matcher
    if request.destination is not None or not pattern or not matcher:
        return ""
    if matcher not in MATCHERS:
        return f"the matcher {matcher[:100]!r} is unknown; use {' or '.join(map(repr, MATCHERS))}"
    if len(pattern) > PATTERN_MAX:
        return f"the pattern has {len(pattern)} characters; the limit is {PATTERN_MAX}"
    try:
        MATCHERS[matcher](pattern)
    except BadPattern as error:
        return str(error)
    return ""


MATCHERS: Mapping[str, Callable[[str], Callable[[str], bool]]] = {
    "glob": lambda pattern: glob_of(pattern).fits,
    "pcre": expression_of,
}
"""Celery's names of matchers, and the function that compiles a pattern for node names."""


def _is_named(destination: Iterable[str], node: str) -> bool:
    return any(name in (node, EVERY_UMBEL_NODE) for name in destination)


def _expired(request: Request, now: float) -> str:
    late_s = now - request.expires_at
    if not request.expires_at or late_s <= EXPIRY_GRACE_S:
        return ""
    return f"the request had expired {late_s:.1f} s before it arrived, by this node's clock"


class Collection:
    """The replies to one request, until its deadline or until all nodes have replied.

    A `limit` ends it at that number of replies. Otherwise it waits for `expected`, the nodes that were named;
    or for the members that the replies name; or, if the broker counts the receivers of a request to all, for
    that number. `timeout_s`: how long to wait for replies; None: the default.
    """

    def __init__(
        self,
        *,
        timeout_s: float | None,
        expected: Iterable[str] = (),
        limit: int | None = None,
        matches: Callable[[MemberReport], bool] = lambda _: True,
    ) -> None:
        self.replies: dict[str, Any] = {}
        self._timeout_s = timeout_s
        # when the request was sent; the same, or when the latest reply arrived
        self._sent_s = self._latest_s = 0.0
        self._is_heard = False
        self._totals: dict[str, int] = {}
        self._expected = frozenset(expected) - {EVERY_UMBEL_NODE}
        self._limit = limit
        self._matches = matches
        self._members: dict[str, MemberReport] = {}
        self._heard: int | None = None

    def sent(self, now: float, *, heard: int | None, is_heard: bool, to_all: bool) -> None:
        """Record that the request was sent, which starts the timeout.

        `heard`: how many nodes received it, if the broker counts them. `is_heard`: at least one node listens
        that the broker does not count. If the request was `to_all`, all of them reply.
        """
        self._sent_s = self._latest_s = now
        self._is_heard = is_heard
        if heard == 0 or to_all:
            self._heard = heard

    @property
    def deadline(self) -> float:
        """Return until when to wait for replies; each reply may change it."""
        if self._timeout_s is not None:
            return self._sent_s + self._timeout_s
        last_s = self._sent_s + ANSWERS_S
        if self._is_heard and not self.replies:
            return last_s
        is_known = self._limit is not None or self._heard is not None or bool(self._awaited())
        return last_s if is_known else min(last_s, self._latest_s + QUIET_S)

    def take(self, reply: Reply, now: float) -> None:
        """Add a reply, and the members that it names."""
        self._latest_s = now
        self.replies[reply.node] = reply.value
        if reply.total is not None and isinstance(reply.value, list):
            self._totals[reply.node] = reply.total
        for member in reply.members:
            known = self._members.get(member.node)
            if known is None or is_better(_opinion(member), _opinion(known)):
                self._members[member.node] = member

    def is_complete(self) -> bool:
        """Return whether no further reply is expected."""
        if self._limit is not None:
            return len(self.replies) >= self._limit
        if self._heard is not None and len(self.replies) >= self._heard:
            return True
        awaited = self._awaited()
        return bool(awaited) and awaited <= self.replies.keys()

    def answers(self) -> Answers:
        """Return the replies so far, and the nodes that did not reply."""
        awaited = self._awaited()
        silent = sorted(awaited - self.replies.keys())
        unknown = sorted(self.replies.keys() - awaited) if awaited else []
        return Answers(
            dict(self.replies),
            tuple(self._members.get(node, MemberReport(node, "unknown")) for node in silent),
            tuple(unknown),
            dict(self._totals),
            self._lost(),
        )

    def _lost(self) -> tuple[MemberReport, ...]:
        found = (known for known in self._members.values() if known.state == "lost" and self._matches(known))
        return tuple(
            sorted(
                (member for member in found if member.node not in self.replies),
                key=lambda member: member.node,
            )
        )

    def _awaited(self) -> frozenset[str] | set[str]:
        if self._expected:
            return self._expected
        return {
            node
            for node, known in self._members.items()
            if known.state in ("alive", "suspect") and self._matches(known)
        }


def _opinion(known: MemberReport) -> Opinion:
    return Opinion(known.state, known.silent_s)
