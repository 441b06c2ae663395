"""Scheduled: the messages that this worker found too early and parked in the broker, to be shown.

They are the broker's again; this is a memory of the last SHOWN_MAX of them, until they are due. A
restarted worker begins with none, and one that was revoked or purged meanwhile stays until then.
"""

from collections import OrderedDict
from collections.abc import Iterator

import msgspec
from msgspec.structs import replace

from umbel.worker.messages.claimed import Claimed

SHOWN_MAX = 1000
BODY_MAX = 4096  # of a larger message only the headers are kept


class Scheduled:
    def __init__(self) -> None:
        self._parked: OrderedDict[str, tuple[float, Claimed]] = OrderedDict()

    def add(self, claimed: Claimed, until: float, now: float) -> None:
        if len(claimed.message.body) > BODY_MAX:
            message = msgspec.structs.replace(claimed.message, body=b"")
            delivery = msgspec.structs.replace(claimed.delivery, message=message)
            claimed = replace(claimed, message=message, delivery=delivery)
        self._parked[claimed.headers.id] = (until, claimed)
        self._parked.move_to_end(claimed.headers.id)
        if len(self._parked) > SHOWN_MAX:
            self.expire(now)
        if len(self._parked) > SHOWN_MAX:
            self._parked.popitem(last=False)

    def expire(self, now: float) -> None:
        for task_id in [one for one, (until, _) in self._parked.items() if until <= now]:
            del self._parked[task_id]

    def __iter__(self) -> Iterator[tuple[float, Claimed]]:
        """(when it is due, the message), the earliest first."""
        return iter(sorted(self._parked.values(), key=lambda entry: entry[0]))
