"""Starting an election, and knowing how it ended.

The client opens the election in the store first, and only then notifies the workers: what was opened
is decided although the message is lost or every worker is down just now. A retry with the same id
finds the same election.
"""

import asyncio
from dataclasses import dataclass
from time import time
from typing import Any

from umbel.app.canvas.signature import Signature
from umbel.app.cluster.topics import Topics, checked_policy
from umbel.app.sending.prepare import new_id
from umbel.brokers.interface import ClusterRecord
from umbel.control.client import Asker
from umbel.errors import ElectionError, ElectionTimeout, UnknownTopic
from umbel.protocol.election.events import outcome_text
from umbel.protocol.election.table import flaw
from umbel.protocol.leadership.coordination import (
    CLOSED_STATES,
    EXPIRES_S,
    NAMESPACE,
    ElectionRecord,
    ElectionRequest,
    ElectionState,
    Granted,
    Policy,
    election_key,
)
from umbel.protocol.pidbox import Answers
from umbel.wire.election import request_arguments, shown_outcome
from umbel.wire.values import encode_json

OURS = ("@v2",)
POLL_FIRST_S, POLL_MOST_S = 0.02, 0.5
ASKED: dict[str, Any] = {"destination": OURS, "timeout_s": 1.0}
END_TTL_S = 5.0
ASK_AFTER_S = 1.0  # an election without a holder by then may have a topic without a handler


@dataclass(frozen=True, slots=True)
class ElectionOutcome:
    """How an election stands. `state`: open, held, done, failed or expired."""

    election_id: str
    state: str
    winner: str = ""
    term: int = 0
    attempt: int = 0
    outcome: str = ""

    @property
    def ok(self) -> bool:
        return self.state == ElectionState.DONE

    @classmethod
    def of(cls, record: ElectionRecord) -> "ElectionOutcome":
        state = shown_outcome(record.state, record.outcome)
        election_id = record.request.election_id
        return cls(election_id, state, record.holder, record.term, record.attempt, record.outcome)


def make_election(
    topics: Topics, election_id: str, topic: str, action: Any, policy: str | None, expires_s: float | None
) -> ElectionRequest:
    request = ElectionRequest(
        election_id=election_id,
        topic=topic,
        action=encode_json(action.to_map() if isinstance(action, Signature) else action, root="action"),
        policy=Policy(topics.policy(topic) if policy is None else checked_policy(policy)),
        asked_at=time(),
        expires_s=EXPIRES_S if expires_s is None else expires_s,
    )
    problem = flaw(request)
    if problem:
        raise ElectionError(f"cannot open election {election_id!r} of topic {topic!r}: {problem}")
    return request


async def hold_election(
    broker: ClusterRecord, asker: Asker, request: ElectionRequest, timeout_s: float
) -> ElectionOutcome:
    """Open it, notify our workers, and wait for how it ends; with no time to wait, only the first two."""
    ends = asyncio.get_running_loop().time() + timeout_s
    key = election_key(NAMESPACE, request.election_id)
    record = await broker.coordination.open_election(key, request)
    known = record.request
    if (known.topic, known.action, known.policy) != (request.topic, request.action, request.policy):
        raise ElectionError(
            f"election {request.election_id!r} already exists, for topic {known.topic!r} "
            "with another action or policy; use another id"
        )
    if record.state in CLOSED_STATES:
        return ElectionOutcome.of(record)
    # As the store keeps it: with the store's time, by which alone it is judged.
    arguments = request_arguments(known)
    await asker.tell("election", arguments, destination=OURS)
    if timeout_s <= 0:
        return ElectionOutcome.of(record)
    try:
        async with asyncio.timeout_at(ends):
            return await _until_closed(broker, asker, key, arguments)
    except TimeoutError:  # it is in the store, and continues without us
        raise ElectionTimeout.after(request.election_id, record.state, timeout_s) from None


async def _until_closed(
    broker: ClusterRecord, asker: Asker, key: str, arguments: dict[str, Any]
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
                refuse_unknown(arguments["topic"], await asker.ask("election", arguments, **ASKED))
            except UnknownTopic as error:
                await _end_as_failed(broker, key, record.request, error)
                raise
        await asyncio.sleep(pause_s)
        pause_s = min(POLL_MOST_S, pause_s * 1.5)


def refuse_unknown(topic: str, answers: Answers) -> None:
    """No worker took it: raise UnknownTopic if all that answered say that they cannot (E3)."""
    replies = [reply for reply in answers.replies.values() if isinstance(reply, dict)]
    problems = [str(reply["error"]) for reply in replies if "error" in reply]
    if problems and len(problems) == len(answers.replies):
        raise UnknownTopic.answered(topic, problems)


async def _end_as_failed(
    broker: ClusterRecord, key: str, request: ElectionRequest, error: UnknownTopic
) -> None:
    """Close an election that no worker can take, or it would stay open until it expires.

    A worker that has taken it meanwhile keeps it: then the store grants nothing here.
    """
    store, holder = broker.coordination, f"client.{new_id()}"
    reply = await store.claim_election(key, holder, request, ttl_s=END_TTL_S)
    if isinstance(reply, Granted) and await store.start_election(key, holder, reply.term):
        await store.finish_election(key, holder, reply.term, outcome_text(False, str(error)))
