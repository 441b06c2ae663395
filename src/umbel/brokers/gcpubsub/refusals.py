"""Refusals: what an answer of Pub/Sub means that is not the one hoped for, in words that tell what to do."""

from collections.abc import Mapping
from typing import Any

import msgspec

from umbel.brokers.gcpubsub.address import EMULATOR_VARIABLE, Address
from umbel.brokers.gcpubsub.http import Answer
from umbel.brokers.tls import tls_refusal
from umbel.errors import AccessRefused, BrokerError, BrokerRefused, BrokerSilent, BrokerUnavailable

_PERMANENT = "PERMANENT_FAILURE"


class Missing(BrokerRefused):
    """There is no such topic or subscription."""


class Exists(BrokerRefused):
    """There is such a topic or subscription already."""


class AcksRefused(BrokerRefused):
    """An exactly-once subscription tells which acknowledgements came too late; the others counted."""

    def __init__(self, message: str, late: frozenset[str], again: frozenset[str]) -> None:
        super().__init__(message)
        self.late = late
        self.again = again


class _Detail(msgspec.Struct, frozen=True):
    metadata: Mapping[str, str] = {}


class _Error(msgspec.Struct, frozen=True):
    message: str = ""
    status: str = ""
    details: list[Any] = []


class _ErrorBody(msgspec.Struct, frozen=True):
    error: _Error = _Error()


_decode = msgspec.json.Decoder(_ErrorBody).decode


def error_of(answer: Answer, address: Address, what: str) -> BrokerError:
    try:
        error = _decode(answer.body).error
    except msgspec.DecodeError:
        error = _Error(answer.body[:200].decode(errors="replace"))
    where, said = f"Pub/Sub at {address}", error.message or f"status {answer.status}"
    match answer.status:
        case 401:
            return AccessRefused(f"{where} does not accept these credentials: {said}")
        case 403:
            return AccessRefused(
                f"{where} does not permit {what}: {said}; grant roles/pubsub.editor to this account"
            )
        case 404:
            return Missing(f"{where} does not have {what}: {said}")
        case 409:
            return Exists(f"{where} has {what} already")
        case 429:
            return BrokerUnavailable(f"{where} is at its quota ({what}): {said}; raise the quota")
        case status if 400 <= status < 499 and status != 408:
            marks = _ack_marks(error)
            if marks:
                late = frozenset(one for one, why in marks.items() if why.startswith(_PERMANENT))
                return AcksRefused(f"{where} refused: {said}", late, frozenset(marks) - late)
            return BrokerRefused(f"{where} refused {what}: {said}")
    return BrokerUnavailable(f"{where} cannot do {what} now: {said} ({answer.status})")


def unreachable(address: Address, problem: BaseException, timeout_s: float) -> BrokerUnavailable:
    where = f"cannot reach Pub/Sub at {address}"
    check = f"check {EMULATOR_VARIABLE}" if address.is_emulator else "check network and endpoint"
    if isinstance(problem, TimeoutError):
        return BrokerSilent(f"{where}: no answer within {timeout_s:g} s; {check}")
    if isinstance(problem, ConnectionRefusedError):
        return BrokerUnavailable(f"{where}: connection refused; {check}")
    if address.tls and (refused := tls_refusal(where, problem, {})) is not None:
        return refused
    return BrokerUnavailable(f"{where}: {str(problem) or type(problem).__name__}; {check}")


def cut_off(address: Address) -> BrokerUnavailable:
    return BrokerUnavailable(f"Pub/Sub at {address} closed the connection before it answered")


def _ack_marks(error: _Error) -> dict[str, str]:
    """Of an exactly-once subscription: what became of each acknowledgement that failed."""
    marks: dict[str, str] = {}
    for detail in error.details:
        try:
            found = msgspec.convert(detail, _Detail).metadata
        except msgspec.ValidationError:
            continue
        marks |= {name: why for name, why in found.items() if "_FAILURE_" in why}
    return marks
