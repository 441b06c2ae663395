"""Which messages are looked at at all, where there are keys."""

import asyncio
from collections.abc import Mapping, Sequence
from time import time
from typing import Any

import pytest
from msgspec.structs import replace

from tests.worker.recorded import QUEUE, TAG, TASK, Recorded, delivery_of, message_of
from umbel.brokers.interface import Bury, Delivery, Permit, Refused, Return
from umbel.errors import BrokerUnavailable
from umbel.protocol.delivery.delivery import TaskRules
from umbel.protocol.delivery.limits import Terms
from umbel.protocol.delivery.trust import GRACE_MAX_S, ClusterId, Doubt, Signed
from umbel.wire.message import Outgoing
from umbel.wire.signing import Keyring, Signer, split_voucher
from umbel.worker.delivery.admit import job_of
from umbel.worker.delivery.claimed import Claimed

UPGRADED_AT = time() - 3600
SIGNER = Signer(Keyring([("k", b"s" * 32)]), ClusterId("here", UPGRADED_AT))
DAY_S = 86_400.0


def signed(
    *,
    at: float | None = None,
    redelivered: bool = False,
    limit: str = "",
    signer: Signer = SIGNER,
    **options: Any,
) -> Delivery:
    message = message_of(**options)
    if limit:
        message = replace(message, headers=message.headers[:-1] + f',"umbel_limit":"{limit}"}}'.encode())
    outgoing = signer.sign_task(Outgoing(QUEUE, message), time() if at is None else at)
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
    recorded = Recorded(signer=SIGNER)
    assert admitted(recorded, signed()) == 1
    (spent,) = recorded.broker.spent
    assert spent.tag == TAG
    assert -60 < spent.expires_at - time() - DAY_S - GRACE_MAX_S <= 0
    assert -60 < spent.born - time() <= 0
    assert recorded.sink.verdicts == []


def test_an_unsigned_message_is_buried_before_anything_is_judged() -> None:
    recorded = Recorded(signer=SIGNER)
    assert admitted(recorded, delivery_of(message_of(task="t.unknown", expires=-5))) == 0
    assert buried(recorded).startswith("unsigned: ")
    assert recorded.counted == {"unsigned": 1, "buried": 1}


def test_a_changed_message_is_buried() -> None:
    recorded, one = Recorded(signer=SIGNER), signed()
    assert admitted(recorded, replace(one, message=replace(one.message, body=b"[[9],{},{}]"))) == 0
    assert buried(recorded).startswith("forged: ")
    assert recorded.counted == {"forged": 1, "buried": 1}


def test_an_old_message_is_buried_unless_it_was_due_since() -> None:
    recorded = Recorded(signer=SIGNER)
    assert admitted(recorded, signed(at=time() - DAY_S - 60)) == 0
    assert buried(recorded).startswith("stale: ")
    assert split_voucher(buried(recorded))[1]  # it certainly did not run
    assert len(recorded.broker.spent) == 1
    assert admitted(Recorded(signer=SIGNER), signed(at=time() - 9 * DAY_S, eta=time() - 60)) == 1


def test_an_old_copy_is_a_copy_however_old_it_is() -> None:
    recorded = Recorded(signer=SIGNER)
    recorded.broker.unusable = {TAG: Doubt.REPLAYED}
    assert admitted(recorded, signed(at=time() - DAY_S - 60)) == 0
    assert buried(recorded).startswith("replayed: ")
    assert not split_voucher(buried(recorded))[1]


@pytest.mark.parametrize("age_s", [DAY_S + GRACE_MAX_S + 60, 0])
def test_where_nobody_remembers_whether_it_ran_it_is_buried_and_nobody_vouches_for_it(age_s: float) -> None:
    """By its age, or because the broker says so."""
    recorded = Recorded(signer=SIGNER)
    recorded.broker.unusable = {TAG: Doubt.STALE}
    assert admitted(recorded, signed(at=time() - age_s)) == 0
    assert "--even-if-used" in buried(recorded)
    assert not split_voucher(buried(recorded))[1]
    assert recorded.counted == {"stale": 1, "buried": 1}


def test_a_message_for_another_cluster_is_buried() -> None:
    recorded = Recorded(signer=SIGNER)
    assert admitted(recorded, signed(signer=Signer(SIGNER.keyring, ClusterId("there")))) == 0
    assert buried(recorded).startswith("forged: ")


@pytest.mark.parametrize(
    ("age_s", "settings", "runs"), [(0, {}, 1), (0, {"unbound_s": 0}, 0), (-2 * DAY_S, {}, 0), (7200, {}, 1)]
)
def test_what_umbel_0_3_signed_runs_for_a_window_after_the_upgrade_and_is_counted(
    age_s: float, settings: dict[str, Any], runs: int
) -> None:
    now = time()
    recorded = Recorded(
        signer=Signer(SIGNER.keyring, ClusterId("here", now - 3600 + min(age_s, 0))), **settings
    )
    row = SIGNER.keyring.sign_row(Outgoing(QUEUE, message_of()), now - max(age_s, 0))
    assert admitted(recorded, delivery_of(row.message)) == runs
    assert recorded.counted.get("unbound", 0) == runs
    assert recorded.counted.get("forged", 0) == 1 - runs


@pytest.mark.parametrize("error", [None, BrokerUnavailable("away")])
def test_an_old_message_that_waited_for_a_limit_passes_its_turn_on_before_it_is_buried(
    error: Exception | None,
) -> None:
    recorded, asked = Recorded(signer=SIGNER), list[Permit]()

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
    assert admitted(Recorded(signer=SIGNER), forged) == 0
    assert asked == []


def test_an_old_message_frees_the_key_of_its_task_and_one_that_is_not_believed_frees_none() -> None:
    recorded = Recorded(signer=SIGNER)
    assert admitted(recorded, signed(at=time() - DAY_S - 60, unique_token="key")) == 0
    assert recorded.sink.released == [("key", "t")]
    one = signed(unique_token="key")
    forged = replace(one, message=replace(one.message, body=b"[[9],{},{}]"))
    copied: Mapping[int | str, Doubt] = {TAG: Doubt.REPLAYED}
    for delivery, unusable in ((forged, {}), (one, copied)):
        recorded = Recorded(signer=SIGNER)
        recorded.broker.unusable = unusable
        assert admitted(recorded, delivery) == 0
        assert recorded.sink.released == []


@pytest.mark.parametrize("redelivered", [False, True])
def test_what_the_broker_calls_a_copy_is_buried_whatever_it_says_of_itself(redelivered: bool) -> None:
    recorded = Recorded(signer=SIGNER)
    recorded.broker.unusable = {TAG: Doubt.REPLAYED}
    assert admitted(recorded, signed(redelivered=redelivered)) == 0
    assert buried(recorded).startswith("replayed: ")
    assert recorded.counted == {"replayed": 1, "buried": 1}


def test_a_broker_that_cannot_tell_gets_the_message_back() -> None:
    recorded = Recorded(signer=SIGNER)
    recorded.broker.error = BrokerUnavailable("away")
    with pytest.raises(BrokerUnavailable):
        admitted(recorded, signed())
    assert recorded.sink.verdicts == [Return(TAG)]


def test_a_broker_that_cannot_tell_gets_unsigned_messages_of_the_same_claim_back_too() -> None:
    """This worker keeps its lease, so no other worker would ever get them."""
    recorded = Recorded(signer=SIGNER, accept_unsigned=(QUEUE,))
    recorded.broker.error = BrokerUnavailable("away")
    both = [replace(delivery_of(), tag="unsigned"), replace(signed(), tag="signed")]
    with pytest.raises(BrokerUnavailable):
        asyncio.run(recorded.admission.verified(both))
    assert recorded.sink.verdicts == [Return("unsigned"), Return("signed")]


@pytest.mark.parametrize("queues", [(QUEUE,), ("other", "*")])
def test_where_the_worker_says_so_no_signature_is_needed(queues: tuple[str, ...]) -> None:
    recorded = Recorded(signer=SIGNER, accept_unsigned=queues)
    (claimed,) = take_in(recorded, delivery_of())
    assert claimed.delivery.unsigned
    one = signed()
    stale = replace(one, message=replace(one.message, body=b"[[9],{},{}]"))  # as a retry by Celery is
    assert admitted(Recorded(signer=SIGNER, accept_unsigned=queues), stale) == 1
    assert recorded.broker.spent == []


def test_what_is_unsigned_must_be_json_whatever_the_worker_accepts() -> None:
    """To read a pickle is to run what its sender wrote."""
    recorded = Recorded(signer=SIGNER, accept_unsigned=(QUEUE,), accept_content=("json", "pickle"))
    pickled = replace(message_of(), content_type="application/x-python-serialize", content_encoding="binary")
    assert admitted(recorded, delivery_of(pickled)) == 0
    assert "only messages in JSON may be unsigned" in buried(recorded)
    assert admitted(Recorded(signer=SIGNER, accept_unsigned=(QUEUE,)), signed(serializer="pickle")) == 1


@pytest.mark.parametrize("is_unsigned", [True, False])
def test_what_a_message_leaves_behind_is_signed_as_it_was(is_unsigned: bool) -> None:
    recorded = Recorded(signer=SIGNER, accept_unsigned=(QUEUE,))
    (claimed,) = take_in(recorded, delivery_of() if is_unsigned else signed())
    recorded.endings.bury(claimed, ValueError("why"))
    assert recorded.signed_for == ["" if is_unsigned else "here"]
    (burial,) = recorded.sink.verdicts
    assert isinstance(burial, Bury)
    assert bool(split_voucher(burial.reason)[1]) is not is_unsigned
    assert (
        job_of(claimed, 0, recorded.context.signs_for(claimed.delivery)).signs_for == recorded.signed_for[0]
    )


@pytest.mark.parametrize(("is_forged", "signs_for"), [(True, ""), (False, "here")])
def test_what_is_sent_once_more_and_refused_is_no_more_trusted_than_it_was(
    is_forged: bool, signs_for: str
) -> None:
    """Anyone can write the header of a signature; the message goes back as its sender wrote it."""
    recorded = Recorded(signer=SIGNER, accept_unsigned=(QUEUE,))
    message = signed().message
    if is_forged:
        message = replace(message, body=b"[[7],{},{}]")
    recorded.endings.end_refused_parts([Refused(Outgoing(QUEUE, message), "its queue is full")])
    assert recorded.signed_for == [signs_for]


def test_one_for_an_exchange_that_is_refused_is_trusted_as_it_was_signed() -> None:
    recorded = Recorded(signer=SIGNER)
    sent = SIGNER.sign_task(Outgoing("", message_of(), exchange="x", routing_key="k"), time())
    recorded.endings.end_refused_parts([Refused(sent, "nothing is bound")])
    assert recorded.signed_for == ["here"]


def test_without_keys_nobody_looks_at_signatures() -> None:
    recorded = Recorded()
    assert admitted(recorded, delivery_of()) == 1
    assert admitted(recorded, signed()) == 1
    assert recorded.broker.spent == []


def test_what_is_sent_again_after_its_early_ack_is_signed_anew() -> None:
    recorded = Recorded(signer=SIGNER, rules=TaskRules(acks_early=True))
    recorded.sink._broker = recorded.context.broker
    (claimed,) = take_in(recorded, signed())
    recorded.endings.give_back(claimed, ran=False)
    (((), (again,)),) = ((tuple(results), tuple(sent)) for results, sent in recorded.sink.reports)
    proofs = [SIGNER.check_task(one, QUEUE)[0] for one in (claimed.message, again.message)]
    assert all(isinstance(proof, Signed) for proof in proofs)
    assert proofs[0] != proofs[1]
