"""Permits: asks the broker whether messages of tasks with a cluster-wide limit may start.

One call covers all such messages of a claim. A message that may not start waits in the broker and no longer
belongs to this worker. The key of the limit is in the message's headers. A sender that does not know the task
sets none; then the key is computed here, if the arguments can be read.
"""

from collections.abc import Mapping, Sequence
from time import monotonic

from umbel.brokers.interface import Permit, Return, Tag
from umbel.errors import BrokerError, BrokerRefused, NotSupported
from umbel.protocol.delivery.limits import ClusterLimit, Terms, bucket_of
from umbel.wire.call import Holding, TaskHeaders
from umbel.wire.message import Outgoing
from umbel.worker.context import WorkerContext
from umbel.worker.delivery.claimed import Claimed
from umbel.worker.delivery.end import Endings
from umbel.worker.delivery.settle import Settler

START_WITHIN_S = 1.0  # a start under a rate counts for now; after this it is returned, and asks again


class Permits:
    """Collects the messages of one claim that need a permit, then asks for all of them."""

    def __init__(self, context: WorkerContext, settler: Settler, endings: Endings) -> None:
        self._broker = context.broker
        self._counters = context.counters
        self._settler = settler
        self._endings = endings
        self._asked: list[tuple[Permit, Claimed]] = []
        self._ending: list[Permit] = []

    @property
    def is_asked(self) -> bool:
        """Whether there is anything to ask the broker."""
        return bool(self._asked or self._ending)

    def ask(self, claimed: Claimed, limit: ClusterLimit) -> None:
        """Add a message to the next call of `granted`; a message whose key cannot be computed is buried."""
        try:
            permit = _permit(claimed, limit)
        except (ValueError, TypeError) as error:
            self._endings.bury(claimed, NotSupported(str(error)))
        else:
            self._asked.append((permit, claimed))

    def pass_on(self, tag: Tag, headers: TaskHeaders | Holding) -> None:
        """Note that a message will not start, or needs no permit any more: the next message gets its turn."""
        turn = turn_of(tag, headers) if self._broker.capabilities.limits else None
        if turn is not None:
            self._ending.append(turn)

    async def granted(self) -> Sequence[Claimed]:
        """Ask the broker; return messages that may start now. The others are parked, returned or buried."""
        asked, self._asked = self._asked, []
        ending, self._ending = self._ending, []
        starting = [claimed for _, claimed in asked]
        for permit, claimed in asked:  # taken before the call: the broker counts from a later time
            claimed.start_by = monotonic() + START_WITHIN_S if permit.terms.pace is not None else 0.0
        refused: Mapping[Tag, str | None]
        try:
            refused = await self._broker.permit([*ending, *(permit for permit, _ in asked)])
        except BrokerRefused as error:
            refused = {claimed.delivery.tag: str(error) or repr(error) for claimed in starting}
        except BrokerError:  # this worker keeps its lease, so no other worker would ever get the messages
            refused = dict.fromkeys((claimed.delivery.tag for claimed in starting), None)
        for claimed in starting:
            if claimed.delivery.tag not in refused:
                continue
            why = refused[claimed.delivery.tag]
            if why is None:
                self._give_back(claimed)
            elif why:
                text = (
                    f"the broker cannot apply the limit of task {claimed.headers.task!r}, so it was not run"
                )
                self._endings.bury(claimed, NotSupported(f"{text}: {why}"))
            else:
                self._counters.parked += 1
        return [claimed for claimed in starting if claimed.delivery.tag not in refused]

    def _give_back(self, claimed: Claimed) -> None:
        """Return a message whose claim may have ended. Settling finds that out.

        If the broker's data was replaced, the message is sent again.
        """
        delivery = claimed.delivery
        message = Outgoing(delivery.queue, claimed.message, redelivered=delivery.redelivered)
        self._settler.add(Return(delivery.tag), message)


def turn_of(tag: Tag, headers: TaskHeaders | Holding) -> Permit | None:
    """Return the request that gives up a message's turn; None if it had no limit when it was sent."""
    key = headers.umbel_limit
    if not isinstance(key, str):
        return None
    return Permit(tag, headers.id, bucket_of(headers.task, key), Terms(), ends=True)


def _permit(claimed: Claimed, limit: ClusterLimit) -> Permit:
    """Return the request for a message; raises ValueError if the key of its limit cannot be computed."""
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
