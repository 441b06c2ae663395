"""Revoke: one entry of the durable record of tasks that must not start, as it is stored."""

import msgspec


class Revoke(msgspec.Struct, frozen=True, gc=False):
    """One entry of the durable revoke record: this task, or tasks with this stamped header.

    One that ends when it begins takes the earlier entry back. It needs no extra room, and is
    handed out until it is swept, so that who has read the earlier one can forget it.
    """

    task_id: str
    recorded_at: float
    expires_at: float
    header: str = ""  # "key=value"; then task_id is empty

    def is_news(self, now: float) -> bool:
        """Whether a reader of the record must hear of it."""
        return self.expires_at > now or self.takes_back

    @property
    def takes_back(self) -> bool:
        return self.expires_at <= self.recorded_at
