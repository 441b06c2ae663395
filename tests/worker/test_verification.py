"""Which messages are looked at at all, where there are keys."""

import asyncio
from collections.abc import Sequence
from time import time
from typing import Any

import pytest
from msgspec.structs import replace

from tests.worker.recorded import QUEUE, TAG, TASK, Recorded, delivery_of, message_of
from umbel.brokers.interface import Bury, Delivery, Permit, Return
from umbel.errors import BrokerUnavailable
from umbel.protocol.delivery.delivery import TaskRules
from umbel.protocol.delivery.limits import Terms
from umbel.protocol.delivery.trust import Signed
from umbel.wire.message import Outgoing
from umbel.wire.signing import Keyring
from umbel.worker.messages.claimed import Claimed

KEYRING = Keyring([("k", b"s" * 32)])
DAY_S = 86_400.0


def signed(
    *, at: float | None = None, redelivered: bool = False, limit: str = "", **options: Any
) -> Delivery:
    message = message_of(**options)
    if limit:
        message = replace(message, headers=message.headers[:-1] + f',"umbel_limit":"{limit}"}}'.encode())
    outgoing = KEYRING.sign_task(Outgoing(QUEUE, message), time() if at is None else at)
    return delivery_of(outgoing.message, redelivered=redelivered)


def admitted(recorded: Recorded, delivery: Delivery) -> int:
    return len(take_in(recorded, delivery))


def take_in(recorded: Recorded, delivery: Delivery) -> list[Claimed]:
    async def verified_first() -> list[Claimed]:
        return await recorded.admission.admit(await recorded.admission.verified([delivery]))

    return asyncio.run(verified_first())


def buried(recorded: Recorded) -> str:
    """The reason; nothing else may be left of a message that is not believed."""
    (burial,) = recorded.sink.verdicts
    assert isinstance(burial, Bury)
    assert (list(burial.results), list(burial.follow_ups)) == ([], [])
    assert (recorded.ended, recorded.told, recorded.sink.reports) == ([], [], [])
    return burial.reason


def test_a_signed_message_runs_and_its_signature_is_used() -> None:
    recorded = Recorded(keyring=KEYRING)
    assert admitted(recorded, signed()) == 1
    (spent,) = recorded.broker.spent
    assert spent.tag == TAG
    assert DAY_S - 60 < spent.expires_at - time() <= DAY_S
    assert recorded.sink.verdicts == []


def test_an_unsigned_message_is_buried_before_anything_is_judged() -> None:
    recorded = Recorded(keyring=KEYRING)
    assert admitted(recorded, delivery_of(message_of(task="t.unknown", expires=-5))) == 0
    assert buried(recorded).startswith("unsigned: ")
    assert recorded.counted == {"unsigned": 1, "buried": 1}


def test_a_changed_message_is_buried() -> None:
    recorded, one = Recorded(keyring=KEYRING), signed()
    assert admitted(recorded, replace(one, message=replace(one.message, body=b"[[9],{},{}]"))) == 0
    assert buried(recorded).startswith("forged: ")
    assert recorded.counted == {"forged": 1, "buried": 1}


def test_an_old_message_is_buried_unless_it_was_due_since() -> None:
    recorded = Recorded(keyring=KEYRING)
    assert admitted(recorded, signed(at=time() - DAY_S - 60)) == 0
    assert buried(recorded).startswith("stale: ")
    assert recorded.broker.spent == []
    assert admitted(Recorded(keyring=KEYRING), signed(at=time() - 9 * DAY_S, eta=time() - 60)) == 1


@pytest.mark.parametrize("error", [None, BrokerUnavailable("away")])
def test_an_old_message_that_waited_for_a_limit_passes_its_turn_on_before_it_is_buried(
    error: Exception | None,
) -> None:
    recorded, asked = Recorded(keyring=KEYRING), list[Permit]()

    async def permit(turns: Sequence[Permit]) -> dict[Any, str | None]:
        assert recorded.sink.verdicts == []
        asked.extend(turns)
        if error is not None:
            raise error
        return {}

    recorded.broker.permit = permit  # type: ignore[attr-defined]
    assert admitted(recorded, signed(at=time() - DAY_S - 60, limit="ada")) == 0
    assert asked == [Permit(TAG, "t", f"{TASK}:ada", Terms(), ends=True)]
    assert buried(recorded).startswith("stale: ")
    asked.clear()
    forged = replace(one := signed(limit="ada"), message=replace(one.message, body=b"[[9],{},{}]"))
    assert admitted(Recorded(keyring=KEYRING), forged) == 0
    assert asked == []


@pytest.mark.parametrize("redelivered", [False, True])
def test_what_the_broker_calls_a_copy_is_buried_whatever_it_says_of_itself(redelivered: bool) -> None:
    recorded = Recorded(keyring=KEYRING)
    recorded.broker.copies = frozenset({TAG})
    assert admitted(recorded, signed(redelivered=redelivered)) == 0
    assert buried(recorded).startswith("replayed: ")
    assert recorded.counted == {"replayed": 1, "buried": 1}


def test_a_broker_that_cannot_tell_gets_the_message_back() -> None:
    recorded = Recorded(keyring=KEYRING)
    recorded.broker.error = BrokerUnavailable("away")
    with pytest.raises(BrokerUnavailable):
        admitted(recorded, signed())
    assert recorded.sink.verdicts == [Return(TAG)]


@pytest.mark.parametrize("queues", [(QUEUE,), ("other", "*")])
def test_where_the_worker_says_so_no_signature_is_needed(queues: tuple[str, ...]) -> None:
    recorded = Recorded(keyring=KEYRING, accept_unsigned=queues)
    assert admitted(recorded, delivery_of()) == 1
    one = signed()
    stale = replace(one, message=replace(one.message, body=b"[[9],{},{}]"))  # as a retry by Celery is
    assert admitted(Recorded(keyring=KEYRING, accept_unsigned=queues), stale) == 1
    assert recorded.broker.spent == []


def test_without_keys_nobody_looks_at_signatures() -> None:
    recorded = Recorded()
    assert admitted(recorded, delivery_of()) == 1
    assert admitted(recorded, signed()) == 1
    assert recorded.broker.spent == []


def test_what_is_sent_again_after_its_early_ack_is_signed_anew() -> None:
    recorded = Recorded(keyring=KEYRING, rules=TaskRules(acks_early=True))
    recorded.sink._broker = recorded.context.broker
    (claimed,) = take_in(recorded, signed())
    recorded.endings.give_back(claimed, ran=False)
    (((), (again,)),) = ((tuple(results), tuple(sent)) for results, sent in recorded.sink.reports)
    proofs = [KEYRING.check_task(one, QUEUE)[0] for one in (claimed.message, again.message)]
    assert all(isinstance(proof, Signed) for proof in proofs)
    assert proofs[0] != proofs[1]
