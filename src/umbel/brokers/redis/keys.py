"""Every key that Umbel reads or writes in Redis, explained.

Celery's, which both sides share (wire 2.1, 6.2):

    <queue>                            list    priorities 0 to 2, newest at the head, popped at the tail
    <queue> SEP 3 | 6 | 9              list    the other priorities; 0 is served first. Steps and SEP may
                                               be others (`scripts.py`)
    _kombu.binding.<exchange>          set     routing key SEP pattern SEP queue
    _kombu.binding_permanent.<exchange>  set   5.7: the same, of queues that stay
    _kombu.binding_deadlines           zset    5.7: exchange -> when its expiring bindings may go (ms)
    celery-task-meta-<task id>         string  a result, with its TTL; also the channel that reports it
    celery-taskset-meta-<group id>.s   string  how many parts a chord has
    celery-taskset-meta-<group id>.j   zset    the parts that have ended, as JSON -> their place
    celery-taskset-meta-<group id>.t   string  how many were added to it while it ran (`add_to_chord`)
    celery-taskset-meta-<group id>.a   set     ids of those that Umbel added, so that each counts once (ours)
    celery-taskset-meta-<group id>     string  the results of a group that was saved, or of a nested header
    celery-taskset-meta-<group id>.d   set     5.7: task id ":" place of the parts that were counted
    celery-taskset-meta-<group id>.c   string  5.7: the sender of the body; "done" once it was sent
    /<database>.<exchange>/<key>       channel fan-out; without a routing key there is no "/<key>"

`unacked`, `unacked_index` and `unacked_mutex` have what a Celery worker took. Umbel does not touch them.

Ours, which Celery does not know:

    umbel.queues                 set     every queue that Umbel published to or consumed
    umbel.inflight.<owner>       hash    what an owner has claimed: "<ticket>:<place>:<list>" -> envelope, and
                                         "epoch" -> the ticket that began this life of the hash
                                         ("kept-<ticket>:...": its claim ended; no worker takes it)
    umbel.apart.<ticket>:...     list    the envelope of one claimed message, which is large: the hash above
                                         has only its name, with a "+" behind its place
    umbel.handed.<owner>         list    a message that the server gave to an idle owner, until it is adopted
    umbel.handing                hash    owner -> the list that it is given messages from
    umbel.handing.given_up       zset    owners of that hash that were given up -> since when; for a minute
    umbel.owners                 zset    owner -> when its lease ends (server's seconds)
    umbel.renewals               hash    owner -> how often it renewed its lease: fewer than it knows of means
                                         that the data was replaced; plus 2^32 for each time the lease ended
    umbel.lost                   zset    owner whose messages were returned and that has not renewed its lease
                                         since -> when; after a week its renewals are forgotten
    umbel.generations            hash    owner -> the least generation of connections it may claim on
    umbel.contact                string  when any owner last called the server by a script
    umbel.turn                   string  a worker has swept for all; gone when it is due again
    umbel.grace                  string  until when no owner counts as dead, after an outage
    umbel.delayed.<queue>        zset    "<ticket>:<place>:<list>" NUL envelope -> when it is due
    umbel.paused                 hash    queue that claims skip -> since when, nodes sent a command, as JSON
    umbel.dead                   stream  dead letters: list, envelope, reason, starts, at
    umbel.dead.dropped           string  how many made room for newer ones
    umbel.dead.asides            zset    id of a letter " " one of the lists below -> when it was made (ms)
    umbel.aside.<ticket>:<n>     list    the envelope of one message that was too large to be claimed; its
                                         letter has the name of this list, in `aside`, and its `size`
    umbel.failed                 stream  messages of failed tasks, to be retried: the same fields
    umbel.failed.dropped         string  how many made room for newer ones
    umbel.revokes                hash    task id NUL header -> revoke, as JSON
    umbel.revokes.order          zset    the same JSON -> its cursor
    umbel.revokes.expiry         zset    task id NUL header -> when it may be forgotten
    umbel.revokes.cursor         string  the last cursor given
    umbel.askers.<exchange>      zset    binding of a reply queue -> until when its client counts as alive
    umbel.unique.<key>           string  the id of the unique task that holds the key; gone with its time
    umbel.holding                string  exists while any message may hold such a key, or a call of a limit
    umbel.limit.<bucket>         hash    what a cluster limit allows: most, or interval and slack, and free_at
    umbel.slots.<bucket>         zset    owner NL field of the claims that hold a slot -> inf; NL task id of
                                         messages that were called -> until when they are waited for
    umbel.waiting.<bucket>       list    messages that wait for a slot: length ":" task id field NUL envelope
    umbel.limits                 zset    buckets that messages wait for -> when a worker should check them
    umbel.waits                  hash    queue -> how many of its messages wait for a limit
    umbel.held.<owner>           hash    field -> the bucket that its claim holds a slot of
    umbel.holders                set     owners that have such a hash
    umbel.sent.<task id>         string  an awaiting client published it; gone after five minutes
    umbel.signature.<mark>       string  owner NL field of the claim whose message used it; "": that has ended
    umbel.cluster                string  since when (Unix time), and the id that signatures are bound to
    umbel.recorders              hash    recorder -> offset it has acknowledged
    umbel.events                 stream  the event log; the ids are "<offset>-0": at, key, body, n
    umbel.events.offset          string  the last offset given
    umbel.events.lost            string  how many events were dropped unread at the limit
    umbel.clock                  string  the cluster's clock mark
    umbel.nothing                string  never has a value: written to find out whether there is memory
    {coord}:e:<key>              hash    one election, gone a day after its last change
    {coord}:open                 zset    elections that are not closed -> when a node should check
    {coord}:l:<name>             hash    one lease: holder, term, expires_at, data
    {coord}:meta                 hash    born, last_term
    {coord}:m:<node>             string  the incarnation of a node that is alive; gone when it is silent

A key prefix (Celery's `global_keyprefix`) is before every one of them, channels included. The keys of results
and chords may have a separate prefix: Celery's result backend has an option of the same name. Scripts build
some of these names themselves (a returned message knows its list). So Redis Cluster, which must get the names
of all keys with each call, is not supported; Celery's layout does not fit it either.
"""

from collections.abc import Sequence

from umbel.brokers.interface import BrokerSettings, Capabilities
from umbel.brokers.redis.scripts import DEFAULT_LISTS, PRIORITY_MAX, Lists, Script, script, steps_problem
from umbel.errors import NotSupported
from umbel.protocol.delivery.trust import ClusterId

RESERVED = {
    "umbel.*": "Umbel's",
    "{coord}:*": "Umbel's",
    "_kombu.binding*": "Celery's",
    "unacked": "Celery's",
    "unacked_index": "Celery's",
    "unacked_mutex": "Celery's",
    "celery-task-meta-*": "those of results",
    "celery-taskset-meta-*": "those of results",
}
"""Names that no queue may have, because they are keys, and to whom these belong."""

CAPABILITIES = Capabilities(
    transport="redis",
    atomic_settle=True,
    stores_results=True,
    fanout=True,
    leases=True,
    delayed=True,
    event_log=True,
    priorities="0 first",
    events_of_others="fan-out",
    unique=True,
    limits=True,
    idle_wait_s=60.0,
    reserved=RESERVED,
)

APART = "+"
"""Follows the place of a claimed message whose envelope is in a separate list (`messages.lua`)."""


def cluster_text(made: ClusterId) -> str:
    """The value of the key `umbel.cluster`."""
    return f"{made.since!r} {made.id}"


def cluster_of(text: bytes | None) -> ClusterId | None:
    """The id in that value; None if there is none, or if the value is malformed."""
    since, _, name = (text or b"").decode(errors="replace").partition(" ")
    try:
        return ClusterId(name, float(since)) if name else None
    except ValueError:
        return None


def tag_of(ticket: str, place: int, list_key: str, sign: str = "") -> str:
    """The tag of a claimed message, which is its field in its owner's hash."""
    return f"{ticket}:{place}{sign}:{list_key}"


class Keys:
    """The names of all keys and channels, and the scripts, for one prefix, database and set of lists."""

    def __init__(
        self,
        prefix: str,
        database: int,
        *,
        result_prefix: str | None = None,
        lists: Lists = DEFAULT_LISTS,
        fanout_prefix: str = "/{db}.",
    ) -> None:
        self.prefix = prefix
        self.result_prefix = prefix if result_prefix is None else result_prefix
        self.sep = lists.sep
        self._lists = lists
        self._suffixes = lists.suffixes
        self._suffix_of = [lists.suffix(lists.step_of(priority)) for priority in range(PRIORITY_MAX + 1)]
        self._scripts: dict[str, Script] = {}
        self._channel = prefix + fanout_prefix.replace("{db}", str(database))
        self.queues = f"{prefix}umbel.queues"
        self.owners = f"{prefix}umbel.owners"
        self.renewals = f"{prefix}umbel.renewals"
        self.turn = f"{prefix}umbel.turn"
        self.handing = f"{prefix}umbel.handing"
        self.revokes_cursor = f"{prefix}umbel.revokes.cursor"
        self.paused = f"{prefix}umbel.paused"
        self.limits = f"{prefix}umbel.limits"
        self.holders = f"{prefix}umbel.holders"
        self.dead = f"{prefix}umbel.dead"
        self.asides = f"{prefix}umbel.dead.asides"
        self.failed = f"{prefix}umbel.failed"
        self.recorders = f"{prefix}umbel.recorders"
        self.events = f"{prefix}umbel.events"
        self.events_offset = f"{prefix}umbel.events.offset"
        self.events_lost = f"{prefix}umbel.events.lost"
        self.clock = f"{prefix}umbel.clock"
        self.open_elections = f"{prefix}{{coord}}:open"

    @classmethod
    def of(cls, settings: BrokerSettings, database: int) -> "Keys":
        """The keys for these settings; NotSupported if their priority steps cannot be used."""
        if problem := steps_problem(settings.priority_steps):
            raise NotSupported(problem)
        return cls(
            settings.key_prefix,
            database,
            result_prefix=settings.result_key_prefix,
            lists=Lists(settings.priority_steps, settings.sep),
            fanout_prefix=settings.fanout_prefix,
        )

    def script(self, name: str) -> Script:
        """The script of this name, for this prefix and these lists."""
        found = self._scripts.get(name)
        if found is None:
            found = self._scripts[name] = script(name, self._lists, self.prefix)
        return found

    def list_of(self, queue: str, priority: int) -> str:
        """The list for messages of this priority."""
        return self.prefix + queue + self._suffix_of[min(max(priority, 0), PRIORITY_MAX)]

    def lists_of(self, queue: str) -> Sequence[str]:
        """The lists of a queue, in the order in which they are served."""
        return [self.prefix + queue + suffix for suffix in self._suffixes]

    def queue_of(self, list_key: str) -> str:
        """The queue of a list, by the end of its name: the separator may be part of a queue's name."""
        name = list_key.removeprefix(self.prefix)
        for suffix in self._suffixes:
            if suffix and name.endswith(suffix):
                return name[: -len(suffix)]
        return name

    def binding_member(self, routing_key: str, pattern: str, queue: str) -> str:
        """The member of a binding set for a binding."""
        return self.sep.join((routing_key, pattern, queue))

    def delayed(self, queue: str) -> str:
        """The set of messages of a queue that are not due."""
        return f"{self.prefix}umbel.delayed.{queue}"

    def inflight(self, owner: str) -> str:
        """The hash of the messages that an owner has claimed."""
        return f"{self.prefix}umbel.inflight.{owner}"

    def apart(self, tag: str) -> str:
        """The list with the envelope of one large claimed message."""
        return f"{self.prefix}umbel.apart.{tag}"

    def handed(self, owner: str) -> str:
        """The list into which the server moves messages for an idle owner."""
        return f"{self.prefix}umbel.handed.{owner}"

    def mark(self, node: str) -> str:
        """The liveness mark of a node."""
        return f"{self.prefix}{{coord}}:m:{node}"

    def signature(self, mark: str) -> str:
        """The record that a signature was used."""
        return f"{self.prefix}umbel.signature.{mark}"

    @property
    def cluster(self) -> str:
        """The id of the cluster."""
        return f"{self.prefix}umbel.cluster"

    def result(self, task_id: str) -> str:
        """The result of a task, and the channel that reports it."""
        return f"{self.result_prefix}celery-task-meta-{task_id}"

    def chord(self, group_id: str) -> str:
        """The key of a saved group; the keys of a chord are this and ".s", ".j", ".t" and so on."""
        return f"{self.result_prefix}celery-taskset-meta-{group_id}"

    def binding(self, exchange: str) -> str:
        """The binding set of an exchange."""
        return f"{self.prefix}_kombu.binding.{exchange}"

    def permanent_binding(self, exchange: str) -> str:
        """The set of bindings of queues that stay (Celery 5.7)."""
        return f"{self.prefix}_kombu.binding_permanent.{exchange}"

    def channel(self, exchange: str, routing_key: str = "") -> str:
        """The pub/sub channel of an exchange and routing key."""
        return f"{self._channel}{exchange}/{routing_key}" if routing_key else f"{self._channel}{exchange}"
