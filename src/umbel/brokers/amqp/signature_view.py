"""Signature view: what one reader of the stream `umbel.signatures` knows of used signatures.

All readers see the same entries in the same order, so all agree which user of a signature was the first. A
user is named `<holder>/<number>`: the holder is the session of a worker, which has an exclusive queue of that
name for as long as it is connected. Umbel 0.3 writes the first three fields of an entry, and names its users
in another way.

Most used signatures belong to messages that have ended. For each, 64 bits are stored, by the time at which
the signature was made, so that the oldest can be forgotten together. Signatures made before `horizon` are
unknown, because there were more than USED_MAX, or because the stream dropped or lost its first entries. A
worker refuses such a signature, since it may have been used.

This file owns the entries about signatures and about the cluster's id. `signatures.py` uses them for claims,
`publishing.py` makes their posts.
"""

from array import array
from bisect import bisect_left
from heapq import merge

import msgspec

from umbel.brokers.amqp import topology
from umbel.brokers.amqp.streams import EntryReader, Label, Seconds
from umbel.protocol.delivery.trust import ClusterId
from umbel.wire.signing import cluster_problem

ENDED, FREE, LOST = "ended", "free", "lost"
USED_MAX, HELD_MAX = 4_000_000, 200_000
BUCKET_S = 300
FRESH_MAX = 20_000
SKEW_S = 60.0  # how far the clocks of senders and workers may differ
KEEP_UNSTATED_S = 8 * 86_400.0  # for an ended one whose entry does not say how long


class SignatureUse(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The user of a signature: a worker's session, ENDED or FREE.

    `born`: when it was made or due. `at`: when this was written. `over`: the user from whom it is taken, or
    who frees it. The user LOST, without a signature: the stream begins here, and signatures used before `at`
    are unknown.
    """

    mark: Label
    user: Label
    expires_at: Seconds = 0.0
    born: Seconds = 0.0
    at: Seconds = 0.0
    over: Label = ""

    @property
    def holder(self) -> str:
        """The session that uses it; "" for a worker of Umbel 0.3."""
        return holder_of(self.user)


def signatures_lost(at: float) -> SignatureUse:
    """Return the first entry of a stream that does not know the signatures used before; `at` 0: none were."""
    return SignatureUse("", LOST, at=at)


def holder_of(user: str) -> str:
    """Return the session in a user's name; "" for a user of Umbel 0.3."""
    return user.rpartition("/")[0]


class SignatureView:
    """The first user of each signature, and the signatures whose messages have ended."""

    def __init__(self) -> None:
        self.entries: EntryReader[SignatureUse] = EntryReader(topology.SIGNATURES, SignatureUse)
        self.horizon = 0.0  # nothing is known of signatures made before this time
        # By user, while it waits for its entries: whether each was first.
        self.attempts: dict[str, dict[str, bool]] = {}
        self.has_read = False
        self._is_cut = False  # the stream's first entries are gone, and the next entry says since when
        self._held: dict[str, SignatureUse] = {}
        self._ended = _Ended()
        # Written by Umbel 0.3: the time until which each use must be remembered.
        self._ended_unstated: dict[str, float] = {}

    def apply(self, offset: int, body: bytes) -> None:
        """Apply one use; the first user of a signature has it until it is freed or taken over."""
        use = self.entries.read(offset, body)
        if use is None:
            return
        if not self.has_read:
            self.has_read, self._is_cut = True, offset > 0
            if use.user == LOST and use.at:
                self.horizon = max(self.horizon, use.at + SKEW_S)
        if self._is_cut and use.at:
            self._is_cut, self.horizon = False, max(self.horizon, use.at + SKEW_S)
        if use.user != LOST:
            self._apply(use)

    def restart(self) -> None:
        """Retain the used signatures."""

    def user(self, mark: str, born: float) -> str | None:
        """Return its user, or ENDED; None if it has no user, or none is known."""
        held = self._held.get(mark)
        if held is not None:
            return held.user
        return ENDED if mark in self._ended_unstated or self._ended.has(mark, born) else None

    def reaches(self, born: float) -> bool:
        """Whether every use of a signature that was made then is known here."""
        return born >= self.horizon

    def sweep(self, now: float) -> None:
        """Forget expired signatures: they are refused without this record."""
        self._held = {key: use for key, use in self._held.items() if use.expires_at > now}
        self._ended_unstated = {key: until for key, until in self._ended_unstated.items() if until > now}
        self._ended.sweep(now)

    def _apply(self, use: SignatureUse) -> None:
        key, known = use.mark, self._held.get(use.mark)
        if use.user == FREE:
            if known is not None and use.over in ("", known.user):
                del self._held[key]
            return
        if use.user == ENDED:
            self._held.pop(key, None)
            self._end(use if use.born or known is None else known)
            return
        is_free = known is None and self.user(key, use.born) is None
        wins = is_free if not use.over else known is not None and known.user == use.over
        if (attempt := self.attempts.get(use.user)) is not None:
            attempt.setdefault(key, wins)
        if wins:
            self._held.pop(key, None)  # re-inserted, so that the newest is the last
            self._held[key] = use
            if len(self._held) > HELD_MAX:
                self._end(self._held.pop(next(iter(self._held))))

    def _end(self, use: SignatureUse) -> None:
        if not use.born:
            if use.expires_at:
                self._ended_unstated[use.mark] = use.expires_at
            if len(self._ended_unstated) > HELD_MAX:
                del self._ended_unstated[next(iter(self._ended_unstated))]
            return
        dropped = self._ended.add(use.mark, use.born, use.expires_at or use.born + KEEP_UNSTATED_S)
        self.horizon = max(self.horizon, dropped)


class _Bucket:
    """Signatures made within BUCKET_S of each other: sorted numbers, and those added since."""

    __slots__ = ("expires_at", "fresh", "packed")

    def __init__(self) -> None:
        self.expires_at = 0.0
        self.fresh: set[int] = set()
        self.packed = array("Q")

    def __len__(self) -> int:
        return len(self.packed) + len(self.fresh)

    def has(self, number: int) -> bool:
        if number in self.fresh:
            return True
        place = bisect_left(self.packed, number)
        return place < len(self.packed) and self.packed[place] == number

    def pack(self) -> None:
        self.packed = array("Q", merge(self.packed, sorted(self.fresh)))
        self.fresh = set()


class _Ended:
    """Signatures whose messages have ended, by when they were made."""

    def __init__(self) -> None:
        self._buckets: dict[int, _Bucket] = {}
        self._count = 0

    def has(self, key: str, born: float) -> bool:
        bucket = self._buckets.get(int(born // BUCKET_S))
        return bucket is not None and bucket.has(_number(key))

    def add(self, key: str, born: float, expires_at: float) -> float:
        """Remember it; return the time before which signatures had to be forgotten for it, 0 if none."""
        place, number = int(born // BUCKET_S), _number(key)
        bucket = self._buckets.get(place)
        if bucket is None:
            bucket = self._buckets[place] = _Bucket()
        elif bucket.has(number):
            return 0.0
        bucket.fresh.add(number)
        bucket.expires_at = max(bucket.expires_at, expires_at)
        self._count += 1
        if len(bucket.fresh) > FRESH_MAX:
            bucket.pack()
        if self._count <= USED_MAX:
            return 0.0
        oldest = min(self._buckets)
        self._count -= len(self._buckets.pop(oldest))
        return float((oldest + 1) * BUCKET_S)

    def sweep(self, now: float) -> None:
        current = int(now // BUCKET_S)
        for place, bucket in list(self._buckets.items()):
            if bucket.expires_at <= now:
                del self._buckets[place]
                self._count -= len(bucket)
            elif bucket.fresh and place < current:
                bucket.pack()


class ClusterView:
    """The id of the cluster: the first entry of its stream counts."""

    def __init__(self) -> None:
        self.entries: EntryReader[ClusterEntry] = EntryReader(topology.CLUSTER, ClusterEntry)
        self.found: ClusterId | None = None

    def apply(self, offset: int, body: bytes) -> None:
        """Apply an entry; all but the first valid one are ignored."""
        made = self.entries.read(offset, body, _problem)
        if self.found is None and made is not None:
            self.found = ClusterId(made.id, made.since)

    def restart(self) -> None:
        """Forget the id, which is gone with its stream."""
        self.found = None


class ClusterEntry(msgspec.Struct, frozen=True):
    """The id of the cluster, and since when the cluster has it."""

    id: str
    since: Seconds = 0.0


def _problem(entry: ClusterEntry) -> str:
    return cluster_problem(entry.id)


def _number(key: str) -> int:
    try:
        return int(key[-16:], 16)
    except ValueError:  # not Umbel's: all of these share one number
        return 0
