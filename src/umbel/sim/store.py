"""The store in memory: `protocol/leadership/coordination.py` behind calls that can fail.

A call is a message to the store and a message back. Each can be lost, doubled and late; so a
decision can be made without the caller hearing of it, and made again long after it was asked for.
The store can be down (calls are lost) and can forget everything (FLUSHALL): then it starts empty.
Its clock runs at the world's rate; the nodes' clocks differ from it.

What is not modelled: a store that goes back to an older copy of itself, and replicas that disagree.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Protocol

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
from umbel.sim.network import Network
from umbel.sim.world import EPOCH_S, World

AGE_S = 3600.0  # how long the store has existed when a world begins


class Observer(Protocol):
    """Sees every change of the store, as a checker does."""

    def called(self, election_id: str) -> None: ...
    def changed(self, key: str, before: ElectionRecord | None, after: ElectionRecord) -> None: ...
    def lease_changed(self, name: str, before: LeaseRecord | None, after: LeaseRecord) -> None: ...
    def forgot_everything(self) -> None: ...


class Store:
    """Its methods are the operations; `call` brings one of them over the network."""

    def __init__(self, world: World, network: Network, observer: Observer) -> None:
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
        """Ask from afar; `answer(context, reply)` is called if a reply arrives, once for each."""
        self._network.call(caller, self._arrive, caller, operation, arguments, answer, context)

    def forget_everything(self) -> None:
        self.resets += 1
        self.elections.clear()
        self.leases.clear()
        self._unfinished.clear()
        self._facts = StoreFacts(self.read_clock().wall_s, 0)
        self._observer.forgot_everything()

    def read_clock(self) -> Instant:
        return Instant(self._world.now, EPOCH_S + self._world.now)

    # ---- elections ---------------------------------------------------------------------------------

    def open(self, key: str, request: ElectionRequest) -> ElectionRecord:
        before = self._count("open", key, request.election_id)
        after = coordination.open_election(before, request, self.read_clock())
        self._keep(key, before, after)
        return after

    def claim(self, key: str, holder: str, request: ElectionRequest, ttl_s: float) -> ElectionReply:
        before = self._count("claim", key, request.election_id)
        after, reply = self.decide_claim(before, holder, request, ttl_s, self.read_clock(), self._facts)
        if isinstance(reply, Granted):
            self._facts = StoreFacts(self._facts.born, max(self._facts.last_term, reply.term))
        self._keep(key, before, after)
        return reply

    def start(self, key: str, holder: str, term: int) -> bool:
        return self._change("start", key, self.decide_start, holder, term)

    def renew(self, key: str, holder: str, term: int) -> bool:
        return self._change("renew", key, self.decide_renew, holder, term)

    def finish(self, key: str, holder: str, term: int, outcome: str) -> bool:
        return self._change("finish", key, self.decide_finish, holder, term, outcome)

    def unfinished(self, limit: int) -> Sequence[tuple[str, ElectionRecord]]:
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
        self.calls["acquire"] += 1
        before = self.leases.get(name)
        after, reply = coordination.acquire_lease(
            before, holder, ttl_s=ttl_s, now=self.read_clock(), last_term=self._facts.last_term
        )
        self._facts = StoreFacts(self._facts.born, max(self._facts.last_term, after.term))
        self._keep_lease(name, before, after)
        return reply

    def renew_lease(self, name: str, holder: str, term: int, ttl_s: float) -> bool:
        self.calls["renew_lease"] += 1
        before = self.leases.get(name)
        after = coordination.renew_lease(before, holder, term, ttl_s=ttl_s, now=self.read_clock())
        return self._keep_lease(name, before, after)

    def release_lease(self, name: str, holder: str, term: int) -> bool:
        self.calls["release"] += 1
        before = self.leases.get(name)
        after = coordination.release_lease(before, holder, term, self.read_clock())
        return self._keep_lease(name, before, after)

    def read_lease(self, name: str) -> LeaseReply:
        self.calls["read_lease"] += 1
        return coordination.read_lease(self.leases.get(name), self.read_clock())

    # ---- the decisions, which a mutant may replace -------------------------------------------------

    def decide_claim(
        self,
        record: ElectionRecord | None,
        holder: str,
        request: ElectionRequest,
        ttl_s: float,
        now: Instant,
        facts: StoreFacts,
    ) -> tuple[ElectionRecord | None, ElectionReply]:
        return coordination.claim_election(record, holder, request, ttl_s=ttl_s, now=now, store=facts)

    def decide_start(
        self, record: ElectionRecord | None, holder: str, term: int, now: Instant
    ) -> ElectionRecord | None:
        return coordination.start_election(record, holder, term, now)

    def decide_renew(
        self, record: ElectionRecord | None, holder: str, term: int, now: Instant
    ) -> ElectionRecord | None:
        return coordination.renew_election(record, holder, term, now)

    def decide_finish(
        self, record: ElectionRecord | None, holder: str, term: int, outcome: str, now: Instant
    ) -> ElectionRecord | None:
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
        if before is not None and operation != "renew":  # how long a handler runs is not the protocol's cost
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
