"""A dead letter that is sent once more is the same task, and what happened to it before is not forgotten."""

from time import time

import pytest
from msgspec.structs import replace

from umbel.protocol.delivery.trust import Doubted, Signed
from umbel.wire.call import read_headers
from umbel.wire.message import COUNT_MAX, Message, Outgoing
from umbel.wire.retried import requeued, retried
from umbel.wire.signing import Keyring, Signer, signer_of

SIGNER = signer_of(Keyring([("k", b"s" * 32)]), "here")
HEADERS = b'{"task":"t","id":"a","retries":4,"x": [1.50,  123456789012345678901]}'
LETTER = Message(HEADERS, b"[[],{},{}]", correlation_id="a", priority=3)


def again(
    message: Message = LETTER,
    *,
    queue: str = "celery",
    starts: int = 3,
    stored: str = "it crashed",
    signer: Signer | None = None,
    even_if_used: bool = False,
) -> Outgoing:
    return requeued(
        queue, message, starts=starts, stored=stored, signer=signer, now=time(), even_if_used=even_if_used
    )


def test_it_is_the_same_call_marked_with_the_starts_it_had() -> None:
    sent = again()
    counted = b'{"task":"t","id":"a","retries":4,"x":[1.50,  123456789012345678901],"umbel_starts":3}'
    assert sent == Outgoing("celery", replace(LETTER, headers=counted), redelivered=True)
    assert (read_headers(sent.message).umbel_starts, read_headers(sent.message).retries) == (3, 4)


def test_starts_of_several_lives_are_added_up() -> None:
    assert read_headers(again(again().message, starts=2).message).umbel_starts == 5
    assert read_headers(again(again().message, starts=0).message).umbel_starts == 3
    assert read_headers(again(again().message, starts=COUNT_MAX).message).umbel_starts == COUNT_MAX


def test_a_task_that_is_retried_begins_with_none() -> None:
    new = retried(again().message, lambda old: f"new {old}", accept=("json",))
    assert b"umbel_starts" not in new.headers


@pytest.mark.parametrize("found", [b"-7", b"true", b'"many"', b"1e999", b"[]"])
def test_a_count_that_is_none_counts_nothing(found: bytes) -> None:
    odd = replace(LETTER, headers=HEADERS[:-1] + b',"umbel_starts":%b}' % found)
    assert read_headers(again(odd).message).umbel_starts == 3


@pytest.mark.parametrize("headers", [b"", b"{", b"[1]", b"\xff"])
def test_what_cannot_be_read_goes_as_it_is(headers: bytes) -> None:
    odd = replace(LETTER, headers=headers)
    assert again(odd) == Outgoing("celery", odd, redelivered=True)


def test_one_for_an_exchange_goes_there() -> None:
    routed = replace(LETTER, exchange="shop", routing_key="eu")
    sent = again(routed, queue="", starts=0)
    assert sent == Outgoing("", routed, redelivered=True, exchange="shop", routing_key="eu")
    assert again(routed, starts=0).exchange == ""  # it names its queue


def test_it_is_signed_again_if_a_worker_vouches_for_it() -> None:
    signed = SIGNER.sign_task(Outgoing("celery", LETTER), 1000.0).message
    stored = SIGNER.vouched("it crashed", signed, "celery", 2000.0)
    sent = again(signed, stored=stored, signer=SIGNER)
    proof, message = SIGNER.check_task(sent.message, sent.queue)
    assert isinstance(proof, Signed) and proof.at > 1_000_000
    assert (read_headers(message).umbel_starts, sent.redelivered) == (3, True)
    twice = SIGNER.check_task(again(signed, stored=stored, signer=SIGNER).message, sent.queue)[0]
    assert isinstance(twice, Signed) and twice.mark == proof.mark  # a copy of the letter is a copy
    forged = again(replace(signed, body=b"[[9],{},{}]"), stored=stored, signer=SIGNER)
    assert isinstance(SIGNER.check_task(forged.message, "celery")[0], Doubted)


def test_what_nobody_vouches_for_keeps_its_headers_unless_somebody_insists() -> None:
    signed = SIGNER.sign_task(Outgoing("celery", LETTER), 1000.0).message
    planted = "stale: it did not run; `umbel dlq requeue` signs it again"
    for copy in (again(signed, signer=SIGNER, stored=planted), again(signed)):
        assert copy == Outgoing("celery", signed, redelivered=True)
    proof, _ = SIGNER.check_task(again(signed, signer=SIGNER, even_if_used=True).message, "celery")
    assert isinstance(proof, Signed) and proof.at > 1_000_000
    unsigned = again(signer=SIGNER, even_if_used=True)
    assert isinstance(SIGNER.check_task(unsigned.message, "celery")[0], Doubted)
