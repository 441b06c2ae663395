"""Permits: asks the broker whether messages may start whose tasks have a limit for the whole cluster.

Only for such messages, and once for all of a claim. What may not start waits in the broker and is no longer
this worker's. The key is in the message's headers; one that was sent by somebody who does not know the task
has none, and is given it here if its arguments can be read.
"""

from collections.abc import Sequence
from time import monotonic

from umbel.brokers.interface import Messages, Permit, Return, Tag
from umbel.errors import BrokerError, BrokerRefused, NotSupported
from umbel.protocol.delivery.limits import ClusterLimit, Terms, bucket_of
from umbel.wire.message import Outgoing
from umbel.wire.task import TaskHeaders
from umbel.worker.context import WorkerContext
from umbel.worker.messages.claimed import Claimed
from umbel.worker.messages.endings import Endings
from umbel.worker.messages.late_permits import PATIENCE_S
from umbel.worker.messages.settling import Settler


class Permits:
    def __init__(self, context: WorkerContext, settler: Settler, endings: Endings) -> None:
        self._broker: Messages = context.broker
        self._are_kept = context.broker.capabilities.limits
        self._counters = context.counters
        self._settler = settler
        self._endings = endings
        self._asked: list[tuple[Permit, Claimed]] = []

    @property
    def is_asked(self) -> bool:
        return bool(self._asked)

    def ask(self, claimed: Claimed, limit: ClusterLimit) -> None:
        """`granted` says whether it may start. One whose key cannot be known is among the dead letters."""
        try:
            permit = _permit(claimed, limit)
        except (ValueError, TypeError) as error:
            self._endings.bury(claimed, NotSupported(str(error)), charged=False)
        else:
            self._asked.append((permit, claimed))

    def pass_on(self, claimed: Claimed) -> None:
        """It will not start, or its task has no limit any more: if it was its turn, the next has it."""
        turn = turn_of(claimed.delivery.tag, claimed.headers) if self._are_kept else None
        if turn is not None:
            self._asked.append((turn, claimed))

    async def granted(self) -> Sequence[Claimed]:
        """Those of the messages asked for that may start now; all others have gone their way."""
        asked, self._asked = self._asked, []
        starting = [claimed for permit, claimed in asked if not permit.ends]
        for permit, claimed in asked:  # before the answer is known: the broker counts from no earlier time
            claimed.start_by = monotonic() + PATIENCE_S if permit.terms.pace is not None else 0.0
        try:
            refused = await self._broker.permit([permit for permit, _ in asked])
        except BrokerError as error:
            self._give_up(starting, error)
            return ()
        for claimed in starting:
            if claimed.delivery.tag not in refused:
                continue
            why = refused[claimed.delivery.tag]
            self._counters.parked += why == ""
            if why is None:
                self._give_back(claimed)
            elif why:
                self._endings.bury(claimed, _not_applied(claimed, why), charged=False)
        return [claimed for claimed in starting if claimed.delivery.tag not in refused]

    def _give_up(self, claimed: Sequence[Claimed], error: BrokerError) -> None:
        """We live and keep our lease, so nobody else would ever return them."""
        for one in claimed:
            if isinstance(error, BrokerRefused):
                self._endings.bury(one, _not_applied(one, error), charged=False)
            else:
                self._give_back(one)

    def _give_back(self, claimed: Claimed) -> None:
        """Others may have it, as its settle finds out; if the data was replaced, nobody has: it is sent."""
        delivery = claimed.delivery
        message = Outgoing(delivery.queue, claimed.message, redelivered=delivery.redelivered)
        self._settler.add(Return(delivery.tag), message)


def turn_of(tag: Tag, headers: TaskHeaders) -> Permit | None:
    """Tells the broker that the message will not start; None: it had no limit when it was sent."""
    key = headers.umbel_limit
    if not isinstance(key, str):
        return None
    return Permit(tag, headers.id, bucket_of(headers.task, key), Terms(), ends=True)


def _not_applied(claimed: Claimed, why: object) -> NotSupported:
    return NotSupported(
        f"the broker cannot apply the limit of task {claimed.headers.task!r}, so it was not run: {why}"
    )


def _permit(claimed: Claimed, limit: ClusterLimit) -> Permit:
    key = claimed.headers.umbel_limit
    if not isinstance(key, str):
        arguments = claimed.arguments()
        if arguments is None:
            raise ValueError(
                f"the limit of task {limit.task!r} needs a key that the message does not have, and its "
                "arguments cannot be read here: send it from an app that has the task, or as JSON"
            )
        key = limit.key_of(*arguments)
    return Permit(claimed.delivery.tag, claimed.headers.id, limit.bucket(key), limit.terms)
