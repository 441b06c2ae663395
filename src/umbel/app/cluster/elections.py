"""Elections and leases that a client asks for: an elected worker performs an action; a lease has one holder
at a time.

    async with app.lease("nightly-report") as lease:
        while lease.still_mine():
            ...

The block begins when the lease is acquired. If the lease is lost later, `still_mine()` is false from then on,
and `lost` is set. The lease is not acquired again inside the block, because the block's work belongs to one
term.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from time import time
from typing import Any

from umbel.app.canvas.signature import Signature
from umbel.app.cluster.topics import Topics, checked_policy, unsigned_action
from umbel.app.sending.preparation import new_id, origin
from umbel.brokers.interface import BrokerSettings, ClusterRecord
from umbel.brokers.registry import open_broker
from umbel.control.client import ControlClient
from umbel.control.panel import NO_HANDLER, NOT_NOW
from umbel.coordination.driver import LeaseKeeper
from umbel.errors import ElectionError, ElectionTimeout, LeaseTimeout, UnknownTopic
from umbel.protocol.election.events import outcome_text
from umbel.protocol.election.table import flaw
from umbel.protocol.leadership.coordination import (
    CLOSED_STATES,
    EXPIRES_S,
    LEASE_TTL_S,
    NAMESPACE,
    ElectionRecord,
    ElectionRequest,
    ElectionState,
    Granted,
    Policy,
    election_key,
)
from umbel.protocol.leadership.lease import LeadershipLost, LeaseAcquired, LeaseReleased, LeaseSettings
from umbel.protocol.pidbox import Answers
from umbel.wire.coordination import request_arguments, shown_outcome
from umbel.wire.message import Outgoing
from umbel.wire.values import encode_json

# ---- elections -------------------------------------------------------------------------------------
#
# The client opens the election in the store first and notifies the workers then. So the election is decided
# even if the notification is lost or every worker is down, and a retry with the same id finds the same
# election.

_OURS = ("@v2",)
POLL_FIRST_S, POLL_MOST_S = 0.02, 0.5
_ASKED: dict[str, Any] = {"destination": _OURS, "timeout_s": 1.0}
END_TTL_S = 5.0
ASK_AFTER_S = 1.0  # if an election has no holder by then, its topic may have no handler


@dataclass(frozen=True, slots=True)
class ElectionOutcome:
    """The status of an election. `state`: open, held, done, failed or expired."""

    election_id: str
    state: str
    winner: str = ""
    term: int = 0
    attempt: int = 0
    outcome: str = ""

    @property
    def ok(self) -> bool:
        """Whether the elected worker has done the action."""
        return self.state == ElectionState.DONE

    @classmethod
    def of(cls, record: ElectionRecord) -> "ElectionOutcome":
        """The outcome of an election from its record in the store."""
        state = shown_outcome(record.state, record.outcome)
        election_id = record.request.election_id
        return cls(election_id, state, record.holder, record.term, record.attempt, record.outcome)


def make_election(
    topics: Topics, election_id: str, topic: str, action: Any, policy: str | None, expires_s: float | None
) -> ElectionRequest:
    """The checked request for an election; ElectionError names the problem."""
    request = ElectionRequest(
        election_id=election_id,
        topic=topic,
        action=encode_json(topics.action_of(election_id, topic, action), root="action"),
        policy=Policy(topics.policy(topic) if policy is None else checked_policy(policy)),
        asked_at=time(),
        expires_s=EXPIRES_S if expires_s is None else expires_s,
    )
    problem = flaw(request)
    if problem:
        raise ElectionError(f"cannot open election {election_id!r} of topic {topic!r}: {problem}")
    return request


async def hold_election(
    broker: ClusterRecord, client: ControlClient, request: ElectionRequest, timeout_s: float
) -> ElectionOutcome:
    """Open an election, notify workers, and wait for its end if there is time to wait."""
    deadline = asyncio.get_running_loop().time() + timeout_s
    key = election_key(NAMESPACE, request.election_id)
    record = await broker.coordination.open_election(key, request)
    known = record.request
    if (known.topic, unsigned_action(known.action), known.policy) != (
        request.topic,
        unsigned_action(request.action),
        request.policy,
    ):
        raise ElectionError(
            f"election {request.election_id!r} already exists, for topic {known.topic!r} "
            "with another action or policy; use another id"
        )
    if record.state in CLOSED_STATES:
        return ElectionOutcome.of(record)
    # The stored request has the store's time, and only that time counts.
    arguments = request_arguments(known)
    await client.tell("election", arguments, destination=_OURS)
    if timeout_s <= 0:
        return ElectionOutcome.of(record)
    try:
        async with asyncio.timeout_at(deadline):
            return await _until_closed(broker, client, key, arguments)
    except TimeoutError:  # the election is stored, and continues without this client
        raise ElectionTimeout.after(request.election_id, record.state, timeout_s) from None


async def _until_closed(
    broker: ClusterRecord, client: ControlClient, key: str, arguments: dict[str, Any]
) -> ElectionOutcome:
    loop = asyncio.get_running_loop()
    began, pause_s, asked = loop.time(), POLL_FIRST_S, False
    while True:
        record = await broker.coordination.read_election(key)
        if record is None:
            raise ElectionError(
                f"the broker has lost the record of election {arguments['id']!r}; open it again"
            )
        if record.state in CLOSED_STATES:
            return ElectionOutcome.of(record)
        if record.state is ElectionState.OPEN and loop.time() - began > ASK_AFTER_S and not asked:
            asked = True
            try:
                answers = await client.ask("election", arguments, **_ASKED)
                refuse_untaken(arguments["topic"], answers, is_stored=True)
            except ElectionError as error:
                await _end_as_failed(broker, key, record.request, error)
                raise
        await asyncio.sleep(pause_s)
        pause_s = min(POLL_MOST_S, pause_s * 1.5)


def refuse_untaken(topic: str, answers: Answers, *, is_stored: bool = False) -> None:
    """Raise an error if no worker that replied can take the election (E3).

    UnknownTopic: they have no handler for its topic. ElectionError: they take part in no such election. A
    worker that is starting may still take an election that is stored.
    """
    problems = list(answers.refusals.values())
    if not problems or len(problems) < len(answers.replies) or (is_stored and NOT_NOW in problems):
        return
    if any(problem.startswith(NO_HANDLER) for problem in problems):
        raise UnknownTopic.answered(topic, problems)
    reasons = "; ".join(sorted(set(problems))[:3])
    raise ElectionError(f"no worker takes part in the election of topic {topic!r}: {reasons}")


async def _end_as_failed(
    broker: ClusterRecord, key: str, request: ElectionRequest, error: ElectionError
) -> None:
    """Close an election that no worker can take, because it would stay open until it expires.

    If a worker has taken it meanwhile, the store grants no claim here, and the election continues.
    """
    store, holder = broker.coordination, f"client.{new_id()}"
    reply = await store.claim_election(key, holder, request, ttl_s=END_TTL_S)
    if isinstance(reply, Granted) and await store.start_election(key, holder, reply.term):
        await store.finish_election(key, holder, reply.term, outcome_text(False, str(error)))


# ---- leases (E6) -----------------------------------------------------------------------------------

RENEWALS_PER_TTL = 3
ASK_EVERY_S = 0.5  # a client is not notified of releases


class HeldLease:
    """A lease that this client held when the block began, and may have lost since then."""

    def __init__(self, broker: ClusterRecord, name: str, ttl_s: float) -> None:
        settings = LeaseSettings(ttl_s=ttl_s, renew_s=ttl_s / RENEWALS_PER_TTL, ask_every_s=ASK_EVERY_S)
        self.name = name
        self.data = b""  # what the last leader stored with `update`
        self.term = 0
        self.lost = asyncio.Event()
        self._broker = broker
        self._acquired = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        holder = f"{origin()}.{new_id()}"  # unique: two campaigns must not share one
        self._keeper = LeaseKeeper(
            broker.coordination, name, holder, settings=settings, changed=self._changed
        )

    def still_mine(self) -> bool:
        """Whether the lease is still held; check it before each effect. If an effect cannot be undone, also
        pass on `term` as a fencing token.
        """
        return not self.lost.is_set() and self._keeper.still_mine()

    async def update(self, data: bytes) -> bool:
        """Store a value for the next leader; False if the lease is lost."""
        store = self._broker.coordination
        return await store.update_lease(self.name, self._keeper.holder, self.term, data)

    async def send(self, signatures: Sequence[Signature[Any]]) -> bool:
        """Send tasks only if the lease is still held, checked in the same step; False: nothing was sent."""
        messages: list[Outgoing] = []
        for signature in signatures:
            call = signature.clone()
            call.freeze()
            messages += [prepared.outgoing for prepared in call.prepare()]
        store = self._broker.coordination
        return await store.fenced_publish(self.name, self._keeper.holder, self.term, messages)

    async def acquire(self, timeout_s: float | None) -> None:
        """Wait for the lease; LeaseTimeout after `timeout_s`."""
        self._task = asyncio.create_task(self._keeper.run(), name=f"umbel-lease-{self.name}")
        try:
            async with asyncio.timeout(timeout_s):
                await self._acquired.wait()
        except TimeoutError:
            assert timeout_s is not None
            raise LeaseTimeout.after(self.name, self._keeper.leader, timeout_s) from None

    async def release(self) -> None:
        """Stop renewing the lease and give it up."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        await self._keeper.stop()

    def _changed(self, change: LeaseAcquired | LeadershipLost | LeaseReleased) -> None:
        match change:
            case LeaseAcquired(term, data):
                self.term, self.data = term, data
                self._acquired.set()
            case LeadershipLost():
                self.lost.set()
                assert self._task is not None
                self._task.cancel()
            case LeaseReleased():
                pass


@asynccontextmanager
async def hold_lease(
    broker_settings: BrokerSettings, name: str, *, ttl: float = LEASE_TTL_S, timeout: float | None = None
) -> AsyncIterator[HeldLease]:
    """Hold a lease inside the block, over a separate connection; LeaseTimeout if it stays taken."""
    broker = open_broker(broker_settings)
    await broker.open()
    try:
        lease = HeldLease(broker, name, ttl)
        try:
            await lease.acquire(timeout)
            yield lease
        finally:
            await lease.release()
    finally:
        await broker.close()
