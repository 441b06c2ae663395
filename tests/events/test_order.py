"""The index keeps its keys in order, forgets the dead, and stays small."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from umbel.events.order import BLOCK_MAX, SLACK, Key, OrderIndex


class Model:
    """The index under test, and the keys that live by the rules of a plain dict."""

    def __init__(self) -> None:
        self.alive: dict[str, Key] = {}
        self.index = OrderIndex(lambda key: self.alive.get(key[4]) is key)

    def move(self, clocks: dict[str, int]) -> None:
        """Give tasks new keys in one batch."""
        self.index.forget(sum(uuid in self.alive for uuid in clocks))
        for uuid, clock in clocks.items():
            self.alive[uuid] = (clock, 0, "h", 1, uuid)
        self.index.add(sorted(self.alive[uuid] for uuid in clocks))

    def check(self) -> None:
        in_order = sorted(self.alive.values())
        assert list(self.index) == in_order
        assert list(reversed(self.index)) == in_order[::-1]
        assert self.index.live == len(in_order)


@given(st.lists(st.dictionaries(st.sampled_from("abcdefghijkl"), st.integers(0, 9), min_size=1), max_size=30))
def test_keys_that_move_are_found_in_their_new_places(moves: list[dict[str, int]]) -> None:
    model = Model()
    for clocks in moves:
        model.move(clocks)
        model.check()


@settings(max_examples=20)
@given(st.randoms(use_true_random=False), st.sampled_from([1, 10, 700, 3000]))
def test_many_keys_stay_in_order_and_in_bounds(chance: random.Random, batch: int) -> None:
    """Batches small and large, in order and not, over many blocks; most keys move again and again."""
    model = Model()
    chance = random.Random(chance.getrandbits(32))
    for number in range(12):
        latest = 1000 * number if chance.random() < 0.5 else 0
        moved = {str(chance.randrange(4000)): latest + chance.randrange(1000) for _ in range(batch)}
        model.move(moved)
    model.check()
    # What a batch kills is cleaned with the next ones, at the latest.
    assert len(model.index) <= 2 * model.index.live + SLACK + 2 * batch


def test_the_oldest_are_taken_and_the_dead_among_them_are_not() -> None:
    model = Model()
    model.move({str(number): number for number in range(3 * BLOCK_MAX)})
    model.move({"0": 10**6})
    taken = model.index.take_oldest(BLOCK_MAX + 5)
    assert [key[4] for key in taken] == [str(number) for number in range(1, BLOCK_MAX + 6)]
    for key in taken:
        del model.alive[key[4]]
    model.check()
    assert len(model.index.take_oldest(10**6)) == 2 * BLOCK_MAX - 5


def test_a_few_survivors_of_many_do_not_lie_in_a_block_each() -> None:
    model = Model()
    for start in range(0, 50 * BLOCK_MAX, BLOCK_MAX):
        model.move({str(number): number for number in range(start, start + BLOCK_MAX)})
        model.index.forget(BLOCK_MAX - 1)
        for number in range(start + 1, start + BLOCK_MAX):
            del model.alive[str(number)]
    model.move({"last": 10**9})
    model.check()
    assert len(model.index) < 5 * BLOCK_MAX
    assert len(model.index._blocks) < 10
