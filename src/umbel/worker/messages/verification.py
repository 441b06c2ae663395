"""Verification: which delivered messages come from somebody who may send; the others get their verdict.

The first look at every message, before it is opened or judged: what is unsigned, forged, too old or a copy
goes to the dead letters. It leaves no result and no event, because it says nothing that can be believed,
not even which task it is. The rules are those of `protocol/delivery/trust.py` and `wire/signing.py`.
"""

from collections.abc import Sequence
from contextlib import suppress

import msgspec
from msgspec.structs import replace

from umbel.brokers.interface import Delivery, Messages, Permit, Return, Spend
from umbel.errors import BrokerError, WireError
from umbel.pools.guard import each_guarded
from umbel.protocol.delivery.trust import Doubt, Doubted, Signed, age_doubt, remembered_until
from umbel.wire.instant import parse_instant
from umbel.wire.message import Message
from umbel.wire.signing import Keyring
from umbel.wire.task import read_headers
from umbel.worker.context import WorkerContext
from umbel.worker.messages.endings import Endings
from umbel.worker.messages.permits import turn_of
from umbel.worker.messages.settling import Settler

EVERY_QUEUE = "*"
_COPY = Doubted(
    Doubt.REPLAYED, "another message already used this signature; a signature is valid for one message"
)


class Verification:
    def __init__(self, keyring: Keyring, context: WorkerContext, settler: Settler, endings: Endings) -> None:
        self._keyring = keyring
        self._broker: Messages = context.broker
        self._limits_are_kept = context.broker.capabilities.limits
        self._settler = settler
        self._endings = endings
        self._window_s = context.settings.signing_window_s
        self._accept_unsigned = frozenset(context.settings.accept_unsigned)
        self._stale: list[tuple[Permit, Delivery, Doubted]] = []  # of a claim: those that others wait for

    async def genuine(self, deliveries: Sequence[Delivery], now: float) -> list[Delivery]:
        checked = each_guarded(lambda one: self._checked(one, now), deliveries, self._endings.bury_faulty)
        if self._stale:
            await self._pass_on()
        passed = [delivery for delivery, _ in filter(None, checked)]
        signatures = [signature for _, signature in filter(None, checked) if signature is not None]
        copies = await self._copies(signatures, passed)
        for delivery in passed:
            if delivery.tag in copies:
                self._endings.distrust(delivery, _COPY)
        return [delivery for delivery in passed if delivery.tag not in copies]

    def _checked(self, delivery: Delivery, now: float) -> tuple[Delivery, Spend | None] | None:
        """The message as it was signed, and its signature; None: it is not believed."""
        proof, message = self._keyring.check_task(delivery.message, delivery.queue)
        if isinstance(proof, Doubted) and self._needs_no_signature(delivery.queue):
            return delivery, None
        due = _due(message)
        believed = age_doubt(proof, due, now, self._window_s) or proof if isinstance(proof, Signed) else proof
        if isinstance(believed, Doubted):
            if isinstance(proof, Signed) and (turn := self._turn_of(delivery, message)):
                self._stale.append((turn, delivery, believed))
            else:
                self._endings.distrust(delivery, believed)
            return None
        until = remembered_until(believed, due, self._window_s)
        return replace(delivery, message=message), Spend(delivery.tag, believed.mark, until)

    def _turn_of(self, delivery: Delivery, message: Message) -> Permit | None:
        with suppress(WireError):
            return turn_of(delivery.tag, read_headers(message)) if self._limits_are_kept else None
        return None

    async def _pass_on(self) -> None:
        """Genuine, and too old, maybe by waiting for a limit: if it was their turn, the next has it."""
        stale, self._stale = self._stale, []
        with suppress(BrokerError):  # then the next has it when nobody has answered the call
            await self._broker.permit([turn for turn, _, _ in stale])
        for _, delivery, doubted in stale:
            self._endings.distrust(delivery, doubted)

    def _needs_no_signature(self, queue: str) -> bool:
        """A signature that does not fit counts as none there: Celery hands on those of earlier attempts."""
        return queue in self._accept_unsigned or EVERY_QUEUE in self._accept_unsigned

    async def _copies(self, signatures: Sequence[Spend], passed: Sequence[Delivery]) -> frozenset[object]:
        try:
            return await self._broker.spend(signatures) if signatures else frozenset()
        except BrokerError:
            for delivery in passed:  # we live and keep our lease, so nobody else would ever return them
                self._settler.add(Return(delivery.tag))
            raise


def _due(message: Message) -> float:
    with suppress(msgspec.DecodeError, WireError):
        eta = _ETA.decode(message.headers).eta
        return parse_instant(eta) if eta else 0.0
    return 0.0  # decoding reports what is wrong with it


class _Eta(msgspec.Struct, frozen=True, gc=False):
    eta: str | None = None


_ETA = msgspec.json.Decoder(_Eta)
