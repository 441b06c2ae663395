"""Limits: asks `limit.lua` which claimed messages may start, and says when those have ended.

What must happen together is in the script. That a claim has ended is told after its settle, in a call of
its own: a worker that dies in between leaves a slot whose claim is gone, which the next sweep of any worker
frees.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from umbel.brokers.interface import Permit, Started, Tag, Verdict
from umbel.brokers.redis.holding import Holding
from umbel.brokers.redis.keys import Keys
from umbel.brokers.redis.link import Link
from umbel.errors import BrokerError

log = logging.getLogger("umbel.brokers.redis")


class Limits:
    def __init__(self, link: Link, keys: Keys, holding: Holding, *, lease_s: float) -> None:
        self._link = link
        self._keys = keys
        self._holding = holding
        self._lease_s = lease_s
        self._slots: dict[Tag, str] = {}  # by claim: the bucket that it holds a slot of

    async def permit(self, asked: Sequence[Permit]) -> Mapping[Tag, str | None]:
        """Those that may not start, and why (`Messages.permit`)."""
        holds, gone = self._holding.holds_of([one.tag for one in asked])
        refused: dict[Tag, str | None] = dict.fromkeys(gone)
        for hold, tags in holds.items():
            batch = [one for one in asked if one.tag in set(tags)]
            with self._holding.moving(tags):
                args = [part for one in batch for part in _arguments(one)]
                reply = await self._run("take", hold.owner, hold.epoch, *args)
            found = {
                batch[place].tag: None if why is None else why.decode(errors="replace")
                for place, why in zip(reply[::2], reply[1::2], strict=True)
            }
            self._holding.let_go(tag for tag, why in found.items() if why == "")
            self._slots |= {
                one.tag: one.bucket
                for one in batch
                if one.terms.most and not one.ends and one.tag not in found
            }
            refused |= found
        return refused

    async def settled(self, owner: str, verdicts: Iterable[Verdict]) -> None:
        """These claims have ended: their slots are free, now or after the next sweep."""
        if not self._slots:
            return
        args: list[Any] = []
        for one in verdicts:
            if not isinstance(one, Started) and (bucket := self._slots.pop(one.tag, None)) is not None:
                args += (one.tag, bucket)
        if not args:
            return
        try:
            await self._run("free", owner, *args)
        except BrokerError as error:  # what was settled stays settled
            log.debug(
                "cannot free the slots of task limits now; the next sweep frees them",
                extra={"why": str(error)},
            )

    def forget(self, tags: Iterable[Tag]) -> None:
        """These claims have ended without a verdict of ours; a sweep frees their slots."""
        for tag in tags:
            self._slots.pop(tag, None)

    async def sweep(self) -> None:
        if await self._link.call("EXISTS", self._keys.holders, self._keys.limits):
            await self._run("sweep")

    async def purge(self, queue: str) -> int:
        removed: int = await self._run("purge", queue)
        return removed

    async def _run(self, verb: str, *args: Any) -> Any:
        return await self._link.run(self._keys.script("limit"), verb, self._keys.prefix, self._lease_s, *args)


def _arguments(one: Permit) -> tuple[Any, ...]:
    pace = one.terms.pace
    most: int | str = "ends" if one.ends else one.terms.most
    interval_s, slack_s = (0.0, 0.0) if pace is None else (pace.interval_s, pace.slack_s)
    return one.tag, one.task_id, one.bucket, most, f"{interval_s:.9f}", f"{slack_s:.6f}"
