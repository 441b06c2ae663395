"""StallWatch: notices a worker that could work, has work, and does not.

Such a worker is worse than a dead one, because nothing replaces it. It is stalled when for
`patience_s` it had free slots, its queues held messages that were due, and it received none of them.
A broker that cannot be asked is another matter: then nobody knows whether there is work.
"""


class StallWatch:
    def __init__(self, *, patience_s: float) -> None:
        self._patience_s = patience_s
        self._received = -1
        self._since: float | None = None

    def is_idle(self, *, received: int, room: int) -> bool:
        """Whether it is worth asking the broker: nothing came since the last look, and there is room."""
        idle = received == self._received and room > 0
        self._received = received
        if not idle:
            self._since = None
        return idle

    def is_stalled(self, *, ready: int | None, now: float) -> bool:
        """Of an idle worker: `ready` messages wait for it, None if the broker could not be asked."""
        if not ready:
            self._since = None
            return False
        if self._since is None:
            self._since = now
        return now - self._since >= self._patience_s
