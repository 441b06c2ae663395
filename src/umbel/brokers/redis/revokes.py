"""Revokes on their way to the record, in batches that a script takes at once."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from umbel.brokers.redis.keys import Keys
from umbel.errors import RevokesFull
from umbel.wire.revoke import Revoke

REVOKES_AT_ONCE = 2000
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class RevokeBatch:
    arguments: Sequence[Any]  # of the script "revoke"
    limit: int
    left: int  # revokes in this batch and those after it

    def check(self, recorded: int) -> None:
        """Take the script's answer."""
        if recorded < 0:
            raise RevokesFull(
                f"the revoke record is at its limit of {self.limit:,} entries: {self.left} more were not "
                "recorded; raise revokes_max, shorten revoke_retention, or purge the queue instead"
            )


def revokes_to_record(keys: Keys, revokes: Sequence[Revoke], limit: int) -> Iterator[RevokeBatch]:
    for first in range(0, len(revokes), REVOKES_AT_ONCE):
        entries: list[str | bytes] = []
        for one in revokes[first : first + REVOKES_AT_ONCE]:
            entries += (f"{one.task_id}\0{one.header}", f"{one.expires_at:.6f}", _encode(one))
        yield RevokeBatch(("record", keys.prefix, limit, *entries), limit, len(revokes) - first)
