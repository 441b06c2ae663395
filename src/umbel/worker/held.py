"""Held: one message that this worker has claimed and not yet settled."""

from dataclasses import dataclass

from umbel.brokers.interface import Delivery
from umbel.pools.interface import Job
from umbel.protocol.delivery import Arrival, Run
from umbel.wire.message import Message
from umbel.wire.task import TaskHeaders, parse_instant


@dataclass(slots=True)
class Held:
    number: int
    delivery: Delivery
    message: Message  # as protocol version 2
    headers: TaskHeaders
    arrival: Arrival
    run: Run | None = None
    told_started: bool = False
    started_at: float | None = None  # Unix time, once it is known to run
    pid: int | None = None
    terminated_by: str = ""  # the signal, when somebody asked to end it

    @property
    def limits(self) -> tuple[float | None, float | None]:
        """(hard, soft): the message's own, else the task's."""
        assert self.run is not None, "only an admitted message has limits"
        hard, soft = self.headers.timelimit
        rules = self.run.rules
        return rules.hard_limit_s if hard is None else hard, rules.soft_limit_s if soft is None else soft

    def job(self) -> Job:
        assert self.run is not None, "only an admitted message becomes a job"
        hard, soft = self.limits
        return Job(
            self.number,
            self.headers.task,
            self.headers.id,
            self.delivery.queue,
            self.message,
            soft,
            hard,
            self.run.alone or hard is not None or soft is not None,
            self.delivery.redelivered,
        )


def arrival_of(delivery: Delivery, headers: TaskHeaders) -> Arrival:
    return Arrival(
        headers.task,
        headers.id,
        parse_instant(headers.eta) if headers.eta else 0.0,
        parse_instant(headers.expires) if headers.expires else 0.0,
        delivery.starts,
        delivery.redelivered,
        headers.stamps,
    )
