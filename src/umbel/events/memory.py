"""Endings: what is remembered of tasks that were dropped from memory, so that none counts twice.

Of each only a hash and its state are kept, in two generations: when the younger is full the older
is forgotten. So at least as many are remembered as fit into one, at a bounded cost. Two
tasks with the same 64-bit hash would be taken for one; among a million that chance is one in some
thirty million.
"""

import msgspec

REMEMBERED_MIN = 1000


class Dropped(msgspec.Struct, frozen=True, gc=False):
    """`state` as it was counted; `ended`: the task does not leave it any more."""

    state: str
    ended: bool


class Endings:
    def __init__(self, generation_max: int) -> None:
        self._generation_max = max(generation_max, REMEMBERED_MIN)
        self._young: dict[int, Dropped] = {}
        self._old: dict[int, Dropped] = {}
        self._shared: dict[tuple[str, bool], Dropped] = {}

    def note(self, uuid: str, state: str, *, ended: bool) -> None:
        if len(self._young) >= self._generation_max:
            self._old, self._young = self._young, {}
            self._shared.clear()  # states of users' making could be many
        self._young[hash(uuid)] = self._shared.setdefault((state, ended), Dropped(state, ended))

    def recall(self, uuid: str) -> Dropped | None:
        """What was noted, which is then forgotten: the task is in memory again."""
        number = hash(uuid)
        return self._young.pop(number, None) or self._old.pop(number, None)

    def __len__(self) -> int:
        return len(self._young) + len(self._old)
