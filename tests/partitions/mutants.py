"""Mutants: real workers with one rule broken, to see that the checkers notice.

Some are the simulator's own, put where a worker looks for its machines.
"""

from typing import Any

from tests.sim.mutants import ActsBeforeStart, LeadsOn
from umbel.coordination import driver
from umbel.protocol.leadership.coordination import Instant
from umbel.protocol.membership import members as said
from umbel.protocol.membership.gossip import Membership
from umbel.worker.steps import elections, gossip
from umbel.worker.steps.scheduler import Scheduler


class NeverTakesBack(Membership):
    """Who was lost once is lost for ever."""

    def step(self, event: Any, now: Instant) -> list[said.Effect]:
        gone = {one.node for one in self.members() if one.state is said.MemberState.LOST}
        if isinstance(event, said.NodeEvent | said.Introduced | said.Answered) and event.node in gone:
            return []
        return super().step(event, now)


class JoinsTwice(Membership):
    def step(self, event: Any, now: Instant) -> list[said.Effect]:
        effects = super().step(event, now)
        return [*effects, *(one for one in effects if isinstance(one, said.Joined))]


class GivesUpTheLiving(Membership):
    """Its other half of the cluster is silent, whatever it says."""

    def step(self, event: Any, now: Instant) -> list[said.Effect]:
        known = {one.node for one in self.members()}
        heard = isinstance(event, said.NodeEvent | said.Answered | said.Introduced) and event.node in known
        if heard and event.node.startswith("w5") and not self._node.startswith("w5"):
            return []
        if isinstance(event, said.Probed):
            return []
        return super().step(event, now)


def break_rule(name: str) -> None:
    """In this process, which is a worker that starts."""
    match name:
        case "" | "drops-the-redelivered":  # that one is a matter of the tasks
            pass
        case "leads-on":
            vars(driver)["Lease"] = LeadsOn
        case "acts-before-start":
            vars(elections)["Elections"] = ActsBeforeStart
        case "never-takes-back":
            vars(gossip)["Membership"] = NeverTakesBack
        case "joins-twice":
            vars(gossip)["Membership"] = JoinsTwice
        case "gives-up-the-living":
            vars(gossip)["Membership"] = GivesUpTheLiving
        case "sends-twice":
            _send_twice()
        case _:
            raise AssertionError(f"unknown mutant {name!r}")


def _send_twice() -> None:
    send = Scheduler._send

    async def twice(self: Any, sending: Any) -> Any:
        await send(self, sending)
        return await send(self, sending)

    Scheduler._send = twice  # type: ignore[method-assign,assignment]
