"""Admission: whether a claimed message may run here: its signature, age, limits and revokes are checked."""

import logging
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import count

import msgspec
from msgspec.structs import replace

from umbel.brokers.interface import Ack, Claim, Delivery, Permit, Return, Spend, Started, Tag, Verdict
from umbel.clock import cluster_now, offset_s
from umbel.errors import BrokerError, NotSupported, TooLarge, WireError
from umbel.pools.interface import Job
from umbel.protocol.delivery.delivery import AdmissionPolicy, Admit, Arrival, Park, Refusal, Refuse
from umbel.protocol.delivery.revoked import RevokedTasks
from umbel.protocol.delivery.trust import (
    Doubt,
    Doubted,
    Signed,
    age_doubt,
    forgotten_doubt,
    remembered_s,
    unbound_doubt,
    unknown_doubt,
)
from umbel.wire.call import TaskHeaders, holding_of, read_headers
from umbel.wire.message import JSON_CONTENT, parse_instant
from umbel.wire.records import Revoke
from umbel.wire.signing import Signer
from umbel.wire.task import to_v2
from umbel.worker.context import WorkerContext
from umbel.worker.delivery.claimed import Claimed, is_same_message
from umbel.worker.delivery.end import Endings, handle_each
from umbel.worker.delivery.permits import Permits, turn_of
from umbel.worker.delivery.settle import Settler
from umbel.worker.delivery.task_events import TaskEvents

log = logging.getLogger("umbel.worker.tasks")

# ---- verification ----------------------------------------------------------------------------------

EVERY_QUEUE = "*"
_COPY = Doubted(
    Doubt.REPLAYED, "another message already used this signature; a signature is valid for one message"
)
_NOT_JSON = Doubted(Doubt.UNSIGNED, "it has no valid signature; only messages in JSON may be unsigned")


class Verification:
    """Checks the signature of every message, where there are keys, before the message is opened or judged.

    An unsigned, forged, too old or copied message is buried. It leaves no result and no event, because
    nothing in it can be believed, not even which task it calls. The rules are those of
    `protocol/delivery/trust.py` and `wire/signing.py`.

    Age is judged after the broker has confirmed that the signature was not used. A copy is a copy however old
    it is, and only a message that certainly did not run may be signed again.
    """

    def __init__(self, context: WorkerContext, settler: Settler, endings: Endings) -> None:
        settings = context.settings
        self._broker = context.broker
        self._counters = context.counters
        self._settler = settler
        self._endings = endings
        self._window_s = settings.signing_window_s
        self._unbound_s = settings.unbound_s
        self._accept_unsigned = frozenset(settings.accept_unsigned)
        # Messages that are too old, and have a turn under a limit that other messages wait for.
        self._stale: list[tuple[Permit, Delivery, Doubted, bool]] = []

    async def verified(self, deliveries: Sequence[Delivery], now: float) -> list[Delivery]:
        """Return the deliveries that may be opened; the others are buried or returned."""
        signer = self._broker.signer
        assert signer is not None, "a worker with keys knows its cluster"
        checked = handle_each(
            lambda delivery: self._check(signer, delivery, now),
            deliveries,
            self._endings.bury_faulty_delivery,
        )
        signed = [found for found in checked if found is not None]
        try:
            doubts = await self._spend([(delivery, proof) for delivery, proof in signed if proof is not None])
        except BrokerError:
            for delivery, _ in signed:  # this worker keeps its lease, so no other worker would get them
                self._settler.add(Return(delivery.tag))
            raise
        verified = [
            delivery
            for delivery, proof in signed
            if proof is None or self._is_usable(delivery, proof, doubts.get(delivery.tag), now)
        ]
        if self._stale:
            await self._bury_stale()
        return verified

    def _check(self, signer: Signer, delivery: Delivery, now: float) -> tuple[Delivery, Signed | None] | None:
        """Return the message as it was signed, with its proof; without a proof it needs no signature.

        None: its signature is not valid, or it cannot be known whether the message is a copy.
        """
        proof, message = signer.check_task(delivery.message, delivery.queue)
        doubted: Doubted | None = proof if isinstance(proof, Doubted) else None
        if isinstance(proof, Signed):
            doubted = unbound_doubt(proof, now, signer.cluster.since, self._unbound_s)
        if doubted is not None and self._needs_no_signature(delivery.queue):
            if delivery.message.content_type == JSON_CONTENT:
                return replace(delivery, unsigned=True), None
            doubted = _NOT_JSON
        if doubted is not None:
            self._endings.bury_untrusted(delivery, doubted)
            return None
        assert isinstance(proof, Signed), "what is not signed is doubted"
        delivery = replace(delivery, message=message)
        if (unknown := unknown_doubt(proof, now, self._window_s)) is not None:
            self._end_stale(delivery, unknown, is_verified=False)
            return None
        return delivery, proof

    def _needs_no_signature(self, queue: str) -> bool:
        """An invalid signature counts as none there: Celery hands on those of earlier attempts."""
        return queue in self._accept_unsigned or EVERY_QUEUE in self._accept_unsigned

    async def _spend(self, signed: Sequence[tuple[Delivery, Signed]]) -> Mapping[Tag, Doubt]:
        """Spend the signatures; return those that were used before, or of which that is unknown."""
        spends = [
            Spend(delivery.tag, proof.mark, proof.born + remembered_s(self._window_s), proof.born)
            for delivery, proof in signed
        ]
        return await self._broker.spend(spends) if spends else {}

    def _is_usable(self, delivery: Delivery, proof: Signed, doubt: Doubt | None, now: float) -> bool:
        """Return whether a signed message may be opened; otherwise it is buried. `doubt`: the broker's."""
        if doubt is Doubt.REPLAYED:
            self._endings.bury_untrusted(delivery, _COPY)
        elif doubt is not None:
            self._end_stale(delivery, forgotten_doubt(proof, now), is_verified=False)
        elif (old := age_doubt(proof, now, self._window_s)) is not None:
            self._end_stale(delivery, old, is_verified=True)
        else:
            self._counters.unbound += not proof.is_bound
            return True
        return False

    def _end_stale(self, delivery: Delivery, doubted: Doubted, *, is_verified: bool) -> None:
        """Bury a genuine message that is too old to run. `is_verified`: it certainly did not run."""
        self._settler.release_of(delivery.message)
        turn = None
        if self._broker.capabilities.limits:
            with suppress(WireError):
                turn = turn_of(delivery.tag, read_headers(delivery.message))
        if turn is None:
            self._endings.bury_untrusted(delivery, doubted, is_verified=is_verified)
        else:
            self._stale.append((turn, delivery, doubted, is_verified))

    async def _bury_stale(self) -> None:
        """Bury genuine messages that are too old, and give up the turns they had for a limit."""
        stale, self._stale = self._stale, []
        with suppress(BrokerError):  # then the turn passes on when the call goes unanswered
            await self._broker.permit([turn for turn, *_ in stale])
        for _, delivery, doubted, is_verified in stale:
            self._endings.bury_untrusted(delivery, doubted, is_verified=is_verified)


# ---- adoption --------------------------------------------------------------------------------------

ADOPTED = "message redelivered while its task is running here; run continues"
ENDED = "message redelivered after its task finished here; outcome acknowledged, task not repeated"


class Adoption:
    """Recognises redelivered messages that run here, or ran here, and settles them without a second run.

    A claim may end while its task runs: RabbitMQ takes back what was claimed on a broken connection, and
    every broker what was claimed by a worker whose lease expired. The same worker may be the next to claim
    it. The run under way takes over the new claim and is settled with it. An outcome that could not be
    settled with the old claim is settled with the new one (`RetainedOutcomes`). If the message goes to
    another worker, both run it, which at-least-once delivery allows.
    """

    def __init__(self, context: WorkerContext, settler: Settler) -> None:
        self._context = context
        self._broker = context.broker
        self._settler = settler

    async def unadopted(
        self, deliveries: Sequence[Delivery], claimed: Mapping[int, Claimed]
    ) -> Sequence[Delivery]:
        """Return the deliveries that do not run here and have not run here; the others are adopted."""
        running = {message.headers.id: message for message in claimed.values()}
        return [
            delivery
            for delivery in deliveries
            if not (delivery.redelivered and await self._adopt(delivery, running, claimed))
        ]

    async def _adopt(
        self, delivery: Delivery, running: Mapping[str, Claimed], claimed: Mapping[int, Claimed]
    ) -> bool:
        """Let the run under way take over the new claim, or settle the outcome of a run that has ended.

        The broker is asked whether the old claim has ended: a published copy has the same content, and the
        claim of a copy must not replace the claim of the run.
        """
        found = running.get(delivery.message.correlation_id)
        if found is not None and is_same_message(found.delivery, delivery):
            has_ended = await self._broker.ended([found.delivery.tag])
            if has_ended and claimed.get(found.number) is found:  # its task may have ended meanwhile
                found.delivery = delivery
                if found.acked:  # its ack did not arrive
                    self._settler.add(Ack(delivery.tag))
                self._note(ADOPTED, "adopted", delivery)
                return True
        if await self._settle_ended(delivery):
            self._note(ENDED, "outcomes settled", delivery)
            return True
        return False

    async def _settle_ended(self, delivery: Delivery) -> bool:
        """Settle a message whose task has ended here; false if its outcome is not known."""
        settler = self._settler
        tag = settler.waiting_outcome(delivery)
        if tag is not None and await self._broker.ended([tag]) and settler.waiting_outcome(delivery) == tag:
            settler.retained.came_back[tag] = delivery
            return True
        if (ack := settler.retained.take(delivery)) is None:
            return False
        settler.add_outcome(ack, delivery)
        return True

    def _note(self, text: str, named: str, delivery: Delivery) -> None:
        self._context.counters.adopted += 1
        task_id = delivery.message.correlation_id
        self._context.outages.consequence(
            log, logging.INFO, text, named=named, queue=delivery.queue, task_id=task_id
        )


# ---- scheduled -------------------------------------------------------------------------------------

SHOWN_MAX = 1000
BODY_MAX = 4096  # of a larger message only the headers are listed


class Scheduled:
    """The messages that this worker parked in the broker until they are due, for inspection.

    They belong to the broker again; this lists the last SHOWN_MAX of them, until they are due. A restarted
    worker begins with none, and a message that was revoked or purged stays listed until then.
    """

    def __init__(self) -> None:
        self._parked: OrderedDict[str, tuple[float, Claimed]] = OrderedDict()  # by task id, with the time

    def add(self, claimed: Claimed, until: float, now: float) -> None:
        """List a parked message; the oldest entry goes when there are too many."""
        if len(claimed.message.body) > BODY_MAX:
            message = replace(claimed.message, body=b"")
            delivery = replace(claimed.delivery, message=message)
            claimed = replace(claimed, message=message, delivery=delivery)
        self._parked[claimed.headers.id] = (until, claimed)
        self._parked.move_to_end(claimed.headers.id)
        if len(self._parked) > SHOWN_MAX:
            self.expire(now)
        if len(self._parked) > SHOWN_MAX:
            self._parked.popitem(last=False)

    def expire(self, now: float) -> None:
        """Drop the entries that are due."""
        for task_id in [parked for parked, (until, _) in self._parked.items() if until <= now]:
            del self._parked[task_id]

    def __iter__(self) -> Iterator[tuple[float, Claimed]]:
        """(when it is due, the message), the earliest first."""
        return iter(sorted(self._parked.values(), key=lambda entry: entry[0]))


# ---- admission -------------------------------------------------------------------------------------


class Admission:
    """Judges claimed messages: those that may run are returned, the others settled, parked or buried.

    The shell of `protocol/delivery/delivery.py`. A message is verified where there are keys, opened and
    judged. If it is acknowledged early, or its start is counted, the broker applies that before its task
    runs. Then it becomes a job for the pool.
    """

    def __init__(
        self,
        context: WorkerContext,
        policy: AdmissionPolicy,
        revoked: RevokedTasks,
        settler: Settler,
        endings: Endings,
        events: TaskEvents,
    ) -> None:
        self.scheduled = Scheduled()
        self._broker = context.broker
        self._pool = context.pool
        self._counters = context.counters
        self._notify_received = context.notices.received if context.notices.wants_received else None
        self._message_max_bytes = context.settings.message_max_bytes
        self._policy = policy
        self._revoked = revoked
        self._settler = settler
        self._endings = endings
        self._events = events
        self._permits = Permits(context, settler, endings)
        self._numbers = count(1)
        has_keys = context.broker.keyring is not None
        self._verification = Verification(context, settler, endings) if has_keys else None

    async def verified(self, deliveries: Sequence[Delivery]) -> Sequence[Delivery]:
        """Return the deliveries whose signatures are valid; the others are buried without being opened."""
        if self._verification is None:
            return deliveries
        return await self._verification.verified(deliveries, cluster_now())

    async def admit(self, deliveries: Sequence[Delivery]) -> list[Claimed]:
        """Return the messages that may run now, once their early acks and starts are at the broker."""
        now = cluster_now()
        judged = handle_each(lambda delivery: self._judge(delivery, now), deliveries, self._bury_unjudged)
        admitted = [claimed for claimed in judged if claimed is not None]
        was_asked = self._permits.is_asked
        if was_asked:
            granted = handle_each(self._take_up, await self._permits.granted(), self._endings.bury_faulty)
            admitted += [claimed for claimed in granted if claimed is not None]
        settled = await self._settled_first(admitted)
        return self._not_revoked(settled) if was_asked or settled is not admitted else settled

    def _judge(self, delivery: Delivery, now: float) -> Claimed | None:
        """Return the message if it may run now; otherwise its verdict goes to the settler."""
        self._counters.received += 1
        claimed = self._opened(delivery)
        if claimed is None:
            return None
        decision = self._policy.admit(claimed.arrival, self._revoked, now)
        if isinstance(decision, Park):
            self._counters.parked += 1
            if claimed.arrival.due > now:  # else it waits for its rate limit
                self.scheduled.add(claimed, decision.until, now)
            self._settler.add(Return(delivery.tag, not_before=decision.until))
            return None
        if isinstance(decision, Refuse):
            if self._events.noted:
                self._events.received(claimed)
            self._endings.refuse(claimed, decision.why)
            self._permits.pass_on(delivery.tag, claimed.headers)
            return None
        let_run(claimed, decision)
        if decision.rules.limit is not None:
            self._permits.ask(claimed, decision.rules.limit)
            return None
        if claimed.headers.umbel_limit is not msgspec.UNSET:  # it had one when this was sent
            self._permits.pass_on(delivery.tag, claimed.headers)
        return self._take_up(claimed)

    def _not_revoked(self, admitted: list[Claimed]) -> list[Claimed]:
        """Refuse what was revoked during calls to the broker, which `drop_revoked` cannot see yet."""
        covers = self._revoked.covers
        revoked = [claimed for claimed in admitted if covers(claimed.arrival.task_id, claimed.arrival.stamps)]
        if not revoked:
            return admitted
        refuse = self._endings.refuse
        handle_each(lambda claimed: refuse(claimed, Refusal.REVOKED), revoked, self._endings.bury_faulty)
        numbers = {claimed.number for claimed in revoked}
        return [claimed for claimed in admitted if claimed.number not in numbers]

    def _take_up(self, claimed: Claimed) -> Claimed | None:
        """Count and announce a message that may run; None if the pool cannot run it, which buries it."""
        delivery = claimed.delivery
        if self._events.noted:
            self._events.received(claimed)
        if delivery.redelivered or delivery.starts:
            self._counters.repeated += 1
        if problem := self._beyond_the_pool(claimed):
            self._endings.bury(claimed, NotSupported(problem))
            return None
        if self._notify_received is not None:
            self._notify_received(claimed.message, delivery.queue)
        return claimed

    def _bury_unjudged(self, delivery: Delivery, error: BaseException) -> None:
        self._endings.bury_faulty_delivery(delivery, error)
        self._release(delivery)

    def _release(self, delivery: Delivery) -> None:
        """Free the unique key and the permit that the headers of an unopened, ended message name."""
        self._settler.release_of(delivery.message)
        if (holding := holding_of(delivery.message)) is not None:
            self._permits.pass_on(delivery.tag, holding)

    def _beyond_the_pool(self, claimed: Claimed) -> str:
        """Return why the pool cannot run it; "" when it can.

        The start checks only the tasks routed to this worker's queues; messages of other tasks may arrive all
        the same.
        """
        assert claimed.run is not None
        abilities, is_async = self._pool.abilities, claimed.run.rules.is_async
        if is_async and abilities.async_tasks:
            return f"this worker's pool cannot run `async def` tasks: {abilities.async_tasks}"
        hard, soft = claimed.hard_limit_s, claimed.soft_limit_s
        if hard is soft is None:
            return ""
        reason = abilities.unenforceable(is_async=is_async, soft=soft is not None, hard=hard is not None)
        return reason and f"this worker's pool cannot enforce the message's time limit: {reason}"

    def _opened(self, delivery: Delivery) -> Claimed | None:
        """Decode the headers of a message; None if it is too large or cannot be decoded, which buries it.

        The body stays encoded: only the child that runs the task decodes it.
        """
        try:
            size = len(delivery.message.body) + len(delivery.message.headers)
            if size > (most := self._message_max_bytes):
                raise TooLarge(
                    f"the message has {size} bytes, over the limit of {most} ('message_max_bytes')"
                )
            message = delivery.message
            if message.content_type != JSON_CONTENT or message.body[:1] != b"[":  # most are plainly v2
                message = to_v2(message)
            headers = read_headers(message)
            arrival = arrival_of(delivery, headers)
        except WireError as error:
            self._endings.bury_unreadable(delivery, error)
            self._release(delivery)
            return None
        claimed = Claimed(next(self._numbers), delivery, message, headers, arrival)
        if (rules := self._policy.rules.get(headers.task)) is not None:
            claimed.hides = rules.hides
        return claimed

    async def _settled_first(self, admitted: list[Claimed]) -> list[Claimed]:
        """Settle early acks and counted starts; return the messages for which that was applied."""
        verdicts: list[Verdict] = []
        for claimed in admitted:
            assert claimed.run is not None
            if claimed.run.rules.acks_early:
                verdicts.append(Ack(claimed.delivery.tag))
                claimed.acked = True
            elif claimed.run.count_start:
                verdicts.append(Started(claimed.delivery.tag))
        if not verdicts:
            return admitted
        try:
            refused = (await self._broker.settle(verdicts)).conflicts
        except BrokerError:
            # This worker keeps its lease, so no other would ever get them. If the early ack was applied in
            # spite of the error, this return is refused, and the task runs at most once, as promised.
            for claimed in admitted:
                self._settler.add(Return(claimed.delivery.tag))
            raise
        self._counters.conflicts += len(refused)
        return [claimed for claimed in admitted if claimed.delivery.tag not in refused]


def arrival_of(delivery: Delivery, headers: TaskHeaders) -> Arrival:
    """Return what the admission policy needs to know of a delivery."""
    return Arrival(
        headers.task,
        headers.id,
        parse_instant(headers.eta) if headers.eta else 0.0,
        parse_instant(headers.expires) if headers.expires else 0.0,
        delivery.starts,
        delivery.redelivered,
        headers.stamps,
    )


def let_run(claimed: Claimed, run: Admit) -> None:
    """Record that the message may run, with its time limits: those of the call, or else of the task.

    0 means no limit.
    """
    hard, soft = claimed.headers.timelimit
    claimed.run = run
    claimed.hard_limit_s = hard or run.rules.hard_limit_s
    claimed.soft_limit_s = soft or run.rules.soft_limit_s


def job_of(claimed: Claimed, lamport: int = 0, signs_for: str | None = None) -> Job:
    """Return the pool's job of an admitted message. `signs_for`: what its results are signed for."""
    assert claimed.run is not None, "only an admitted message becomes a job"
    hard, soft = claimed.hard_limit_s, claimed.soft_limit_s
    return Job(
        claimed.number,
        claimed.headers.task,
        claimed.headers.id,
        claimed.delivery.queue,
        claimed.message,
        soft,
        hard,
        claimed.run.alone or hard is not None or soft is not None,
        claimed.delivery.redelivered,
        offset_s(),
        lamport,
        0.0 if claimed.acked else claimed.start_by,
        signs_for,
    )


# ---- revoke record ---------------------------------------------------------------------------------


class RevokeRecord:
    """Reads the broker's record of revokes into this worker's revoked tasks.

    `cursor`: how far it was read.
    """

    def __init__(self, context: WorkerContext, revoked: RevokedTasks) -> None:
        self.cursor = 0
        self._context = context
        self._revoked = revoked

    async def read(self) -> None:
        """Read the whole record without claiming a message."""
        read, owner, queues = -1, self._context.identity.owner, self._context.settings.queues
        while read != self.cursor:
            read = self.cursor
            self.learn(await self._context.broker.claim(owner, queues, 0, revoked_after=read), after=read)

    def read_again(self) -> None:
        """Read from the start, because the record was replaced. Known revokes stay in force here."""
        self.cursor = 0

    def learn(self, claim: Claim, *, after: int) -> None:
        """Apply the revokes that came with a claim. `after`: the cursor that the claim was made with."""
        for revoke in claim.revokes:
            if revoke.takes_back:
                self.take_back(revoke)
            elif revoke.task_id:
                self._revoked.add(revoke.task_id, revoke.expires_at, revoke.recorded_at)
            elif revoke.header:
                self._revoked.add_header(revoke.header, revoke.expires_at)
        if self.cursor == after:  # else the record was replaced meanwhile
            self.cursor = claim.revoked_cursor

    def take_back(self, revoke: Revoke) -> None:
        """Forget a revoke that the record or a command takes back."""
        if revoke.header:
            self._revoked.take_back_header(revoke.header)
        else:
            self._revoked.take_back(revoke.task_id, cluster_now())
