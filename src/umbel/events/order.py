"""An index of tasks sorted by key, where the cost of a change hardly depends on the number of tasks.

A task's key changes with almost every event. Removing the old key at once would cost as much as inserting the
new one, so it stays as a dead key. Readers skip dead keys, and a dead key is removed when its block is next
written. Keys are in sorted blocks of limited size. A batch of new keys is merged block by block, in O(log n)
for each key.

The number of dead keys never exceeds the number of live keys by more than a few: beyond that, each batch also
cleans some blocks. So memory is bounded, and no single call has to clean the whole index.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterator, Sequence

Key = tuple[int, int, str, int, str]
"""(clock, time, hostname, pid, task id): strictly ordered, because no two tasks share an id."""

BLOCK_MAX = 1000
FEW = 16
SLACK = 64
SWEEP_FACTOR = 4


class OrderIndex:
    """Keys in order. `is_alive(key)` says whether a key is still its task's key; `live` counts such keys."""

    __slots__ = ("_blocks", "_is_alive", "_size", "_swept", "_tops", "live")

    def __init__(self, is_alive: Callable[[Key], bool]) -> None:
        self.live = 0
        self._is_alive = is_alive
        self._blocks: list[list[Key]] = []
        self._tops: list[Key] = []  # the last key of each block; higher keys go into the last block
        self._size = 0
        self._swept = 0

    def add(self, keys: Sequence[Key]) -> None:
        """Add new keys, in order. If a task had an older key, the caller also calls `forget`."""
        self.live += len(keys)
        self._size += len(keys)
        start = 0
        while start < len(keys):
            at = min(bisect_left(self._tops, keys[start]), len(self._blocks) - 1)
            if at < 0:
                self._blocks, self._tops, at = [[]], [keys[-1]], 0
            is_last = at == len(self._blocks) - 1
            end = len(keys) if is_last else bisect_right(keys, self._tops[at], start)
            _merge(self._blocks[at], keys[start:end])
            self._settle(at)
            start = end
        self._sweep(SWEEP_FACTOR * len(keys))

    def forget(self, count: int = 1) -> None:
        """Count keys that became dead."""
        self.live -= count
        assert self.live >= 0, "more keys became dead than were alive"
        self._sweep(SWEEP_FACTOR * count)

    def take_oldest(self, count: int) -> list[Key]:
        """Remove the lowest live keys and return them."""
        taken: list[Key] = []
        while len(taken) < count and self._blocks:
            block, passed = self._blocks[0], 0
            for key in block:
                if len(taken) == count:
                    break
                passed += 1
                if self._is_alive(key):
                    taken.append(key)
            self._replace(0, block[passed:])
        self.live -= len(taken)
        return taken

    def __iter__(self) -> Iterator[Key]:
        for block in self._blocks:
            yield from filter(self._is_alive, block)

    def __reversed__(self) -> Iterator[Key]:
        return self.descending(None)

    def descending(self, below: Key | None) -> Iterator[Key]:
        """Yield the live keys from the highest down, or from the highest below a key."""
        at = (
            len(self._blocks) if below is None else min(bisect_left(self._tops, below) + 1, len(self._blocks))
        )
        for block in reversed(self._blocks[:at]):
            end = len(block) if below is None else bisect_left(block, below)
            for index in range(end - 1, -1, -1):
                if self._is_alive(block[index]):
                    yield block[index]

    def __len__(self) -> int:
        """Return the number of keys in memory, including dead ones."""
        return self._size

    def _settle(self, at: int) -> None:
        """After a block has grown: clean it if it is too long, split it if it is still too long."""
        block = self._blocks[at]
        if len(block) > BLOCK_MAX:
            self._replace(at, list(filter(self._is_alive, block)))

    def _replace(self, at: int, keys: list[Key]) -> None:
        """Replace a block by these keys: join it to the block before if both are short, or split it in
        halves.
        """
        self._size += len(keys) - len(self._blocks[at])
        if keys and at > 0 and len(self._blocks[at - 1]) + len(keys) <= BLOCK_MAX // 2:
            self._blocks[at - 1] += keys
            self._tops[at - 1] = keys[-1]
            keys = []
        step = BLOCK_MAX if len(keys) <= BLOCK_MAX else BLOCK_MAX // 2
        blocks = [keys[start : start + step] for start in range(0, len(keys), step)]
        self._blocks[at : at + 1] = blocks
        self._tops[at : at + 1] = [block[-1] for block in blocks]

    def _sweep(self, budget: int) -> None:
        while budget > 0 and self._size > 2 * self.live + SLACK:
            self._swept = self._swept % len(self._blocks)
            block = self._blocks[self._swept]
            budget -= len(block)
            alive = list(filter(self._is_alive, block))
            before = len(self._blocks)
            self._replace(self._swept, alive)
            self._swept += 1 + len(self._blocks) - before


def _merge(block: list[Key], keys: Sequence[Key]) -> None:
    if len(keys) <= FEW and block and keys[0] < block[-1]:
        for key in keys:
            insort(block, key)
        return
    was_in_order = not block or block[-1] < keys[0]
    block += keys
    if not was_in_order:
        block.sort()
