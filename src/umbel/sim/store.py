"""The store in memory: `protocol/leadership/coordination.py` behind calls that can fail.

A call is a message to the store and a message back. Each can be lost, duplicated and late. So a decision can
be made without the caller receiving it, and made again long after the call. The store can be down (calls are
lost) and can lose all data (FLUSHALL), after which it is empty. Its clock runs at the world's rate; the
nodes' clocks differ from it.

Not simulated: a store that is restored from an older copy, and replicas that disagree.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from umbel.protocol.leadership import coordination
from umbel.protocol.leadership.coordination import (
    ElectionRecord,
    ElectionReply,
    ElectionRequest,
    ElectionState,
    Granted,
    Instant,
    LeaseRecord,
    LeaseReply,
    StoreFacts,
)
from umbel.sim.world import EPOCH_S, Network, World

if TYPE_CHECKING:
    from umbel.sim.checkers import Checkers

AGE_S = 3600.0  # the age of the store when a world begins


class Store:
    """The store. Its methods are the operations; `call` runs one of them over the network."""

    def __init__(self, world: World, network: Network, observer: "Checkers") -> None:
        self.down = False
        self.elections: dict[str, ElectionRecord] = {}
        self.leases: dict[str, LeaseRecord] = {}
        self.calls: Counter[str] = Counter()
        self.resets = 0
        self._unfinished: dict[str, None] = {}
        self._world = world
        self._network = network
        self._observer = observer
        self._facts = StoreFacts(EPOCH_S - AGE_S, 0)

    def call(
        self,
        caller: int,
        operation: Callable[..., Any],
        arguments: tuple[Any, ...],
        answer: Callable[[Any, Any], None],
        context: Any,
    ) -> None:
        """Call an operation over the network; `answer(context, reply)` gets each reply that arrives."""
        self._network.call(caller, self._arrive, caller, operation, arguments, answer, context)

    def forget_everything(self) -> None:
        """Lose all data, as after FLUSHALL."""
        self.resets += 1
        self.elections.clear()
        self.leases.clear()
        self._unfinished.clear()
        self._facts = StoreFacts(self.read_clock().wall_s, 0)
        self._observer.forgot_everything()

    def read_clock(self) -> Instant:
        """Return the store's time."""
        return Instant(self._world.now, EPOCH_S + self._world.now)

    # ---- elections ---------------------------------------------------------------------------------

    def open(self, key: str, request: ElectionRequest) -> ElectionRecord:
        """Open an election, unless it is open."""
        before = self._count("open", key, request.election_id)
        after = coordination.open_election(before, request, self.read_clock())
        self._keep(key, before, after)
        return after

    def claim(self, key: str, holder: str, request: ElectionRequest, ttl_s: float) -> ElectionReply:
        """Claim an election."""
        before = self._count("claim", key, request.election_id)
        after, reply = self.decide_claim(before, holder, request, ttl_s, self.read_clock(), self._facts)
        if isinstance(reply, Granted):
            self._facts = StoreFacts(self._facts.born, max(self._facts.last_term, reply.term))
        self._keep(key, before, after)
        return reply

    def start(self, key: str, holder: str, term: int) -> bool:
        """Start a granted election; return whether the holder may act."""
        return self._change("start", key, self.decide_start, holder, term)

    def renew(self, key: str, holder: str, term: int) -> bool:
        """Renew a grant; return whether the holder still has it."""
        return self._change("renew", key, self.decide_renew, holder, term)

    def finish(self, key: str, holder: str, term: int, outcome: str) -> bool:
        """Store an outcome; return whether it was accepted."""
        return self._change("finish", key, self.decide_finish, holder, term, outcome)

    def unfinished(self, limit: int) -> Sequence[tuple[str, ElectionRecord]]:
        """Return elections that a node should claim, at most `limit`."""
        self.calls["unfinished"] += 1
        now = self.read_clock()
        found = []
        for key in self._unfinished:
            record = self.elections[key]
            if coordination.is_unfinished(record, now):
                found.append((key, record))
                if len(found) == limit:
                    break
        return found

    # ---- leases ------------------------------------------------------------------------------------

    def acquire_lease(self, name: str, holder: str, ttl_s: float) -> LeaseReply:
        """Take a lease if it is free."""
        self.calls["acquire"] += 1
        before = self.leases.get(name)
        after, reply = coordination.acquire_lease(
            before, holder, ttl_s=ttl_s, now=self.read_clock(), last_term=self._facts.last_term
        )
        self._facts = StoreFacts(self._facts.born, max(self._facts.last_term, after.term))
        self._keep_lease(name, before, after)
        return reply

    def renew_lease(self, name: str, holder: str, term: int, ttl_s: float) -> bool:
        """Renew a lease; return whether the holder still has it."""
        self.calls["renew_lease"] += 1
        before = self.leases.get(name)
        after = coordination.renew_lease(before, holder, term, ttl_s=ttl_s, now=self.read_clock())
        return self._keep_lease(name, before, after)

    def release_lease(self, name: str, holder: str, term: int) -> bool:
        """Release a lease; return whether the caller held it."""
        self.calls["release"] += 1
        before = self.leases.get(name)
        after = coordination.release_lease(before, holder, term, self.read_clock())
        return self._keep_lease(name, before, after)

    def read_lease(self, name: str) -> LeaseReply:
        """Return a lease and its holder."""
        self.calls["read_lease"] += 1
        return coordination.read_lease(self.leases.get(name), self.read_clock())

    # ---- decisions, which mutants replace ----------------------------------------------------------

    def decide_claim(
        self,
        record: ElectionRecord | None,
        holder: str,
        request: ElectionRequest,
        ttl_s: float,
        now: Instant,
        facts: StoreFacts,
    ) -> tuple[ElectionRecord | None, ElectionReply]:
        """Decide a claim by `coordination.claim_election`."""
        return coordination.claim_election(record, holder, request, ttl_s=ttl_s, now=now, store=facts)

    def decide_start(
        self, record: ElectionRecord | None, holder: str, term: int, now: Instant
    ) -> ElectionRecord | None:
        """Decide a start by `coordination.start_election`."""
        return coordination.start_election(record, holder, term, now)

    def decide_renew(
        self, record: ElectionRecord | None, holder: str, term: int, now: Instant
    ) -> ElectionRecord | None:
        """Decide a renewal by `coordination.renew_election`."""
        return coordination.renew_election(record, holder, term, now)

    def decide_finish(
        self, record: ElectionRecord | None, holder: str, term: int, outcome: str, now: Instant
    ) -> ElectionRecord | None:
        """Decide an outcome by `coordination.finish_election`."""
        return coordination.finish_election(record, holder, term, outcome, now)

    # ---- inside ------------------------------------------------------------------------------------

    def _arrive(
        self,
        caller: int,
        operation: Callable[..., Any],
        arguments: tuple[Any, ...],
        answer: Callable[[Any, Any], None],
        context: Any,
    ) -> None:
        if not self.down:
            self._network.call(caller, answer, context, operation(*arguments))

    def _count(self, operation: str, key: str, election_id: str) -> ElectionRecord | None:
        self.calls[operation] += 1
        self._observer.called(election_id)
        return self.elections.get(key)

    def _change(
        self, operation: str, key: str, decide: Callable[..., ElectionRecord | None], *arguments: Any
    ) -> bool:
        before = self.elections.get(key)
        self.calls[operation] += 1
        if (
            before is not None and operation != "renew"
        ):  # renewals depend on how long handlers run, not on the protocol
            self._observer.called(before.request.election_id)
        after = decide(before, *arguments, self.read_clock())
        self._keep(key, before, after)
        return after is not None

    def _keep(self, key: str, before: ElectionRecord | None, after: ElectionRecord | None) -> None:
        if after is None or after is before:
            return
        self.elections[key] = after
        if after.state in (ElectionState.OPEN, ElectionState.HELD):
            self._unfinished[key] = None
        else:
            self._unfinished.pop(key, None)
        self._observer.changed(key, before, after)

    def _keep_lease(self, name: str, before: LeaseRecord | None, after: LeaseRecord | None) -> bool:
        if after is None:
            return False
        if after is not before:
            self.leases[name] = after
            self._observer.lease_changed(name, before, after)
        return True
