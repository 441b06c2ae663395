"""What every result store that counts chords promises."""

from concurrent.futures import ThreadPoolExecutor

from tests.backends.contract import Stores
from umbel.backends.interface import Backend, ChordPart


def part(index: int, status: str = "SUCCESS") -> ChordPart:
    return ChordPart("g", index, f"task-{index}", status, str(index * 10).encode())


def payloads(parts: object) -> list[bytes]:
    assert isinstance(parts, list)
    return [one.payload for one in parts]


class ChordContract:
    def test_the_last_part_brings_all_of_them_in_their_order(self, stores: Stores) -> None:
        one, other = stores(), stores()
        one.start_chord("g", 3)
        assert one.add_chord_part(part(2)) is None
        assert other.add_chord_part(part(0, "FAILURE")) is None
        found = other.add_chord_part(part(1))
        assert payloads(found) == [b"0", b"10", b"20"]
        assert found is not None
        assert [(each.task_id, each.status) for each in found] == [
            ("task-0", "FAILURE"),
            ("task-1", "SUCCESS"),
            ("task-2", "SUCCESS"),
        ]

    def test_a_part_that_comes_twice_counts_once(self, stores: Stores) -> None:
        backend = stores()
        backend.start_chord("g", 2)
        assert backend.add_chord_part(part(0)) is None
        assert backend.add_chord_part(part(0)) is None
        assert payloads(backend.add_chord_part(part(1))) == [b"0", b"10"]

    def test_a_last_part_that_is_redelivered_can_finish_what_its_former_run_began(
        self, stores: Stores
    ) -> None:
        backend = stores()
        backend.start_chord("g", 1)
        assert backend.add_chord_part(part(0)) is not None
        assert backend.claim_chord("g", "task-0")
        again = stores()  # the first run died here, before it sent the body
        assert again.add_chord_part(part(0)) is not None
        assert again.claim_chord("g", "task-0")

    def test_of_parts_that_are_repeated_together_one_may_send_the_body(self, stores: Stores) -> None:
        backend, other = stores(), stores()
        backend.start_chord("g", 2)
        backend.add_chord_part(part(0))
        assert backend.add_chord_part(part(1)) is not None
        assert other.add_chord_part(part(0)) is not None  # delivered again before the body was sent
        assert backend.claim_chord("g", "task-1")
        assert not other.claim_chord("g", "task-0")
        assert backend.claim_chord("g", "task-1")

    def test_an_ended_chord_stays_ended(self, stores: Stores) -> None:
        backend = stores()
        backend.start_chord("g", 1)
        assert backend.add_chord_part(part(0)) is not None
        backend.end_chord("g", ())
        assert backend.add_chord_part(part(0)) is None
        assert not backend.claim_chord("g", "task-0")
        backend.start_chord("g", 1)  # its sender was redelivered
        assert backend.add_chord_part(part(0)) is None

    def test_of_parts_that_end_together_exactly_one_is_the_last(self, stores: Stores) -> None:
        backends = [stores() for _ in range(4)]
        for number in range(10):
            group_id = f"g{number}"
            backends[0].start_chord(group_id, 4)

            def end(index: int, backend: Backend, group_id: str = group_id) -> bool:
                ended = ChordPart(group_id, index, f"{group_id}-{index}", "SUCCESS", b"1")
                return backend.add_chord_part(ended) is not None

            with ThreadPoolExecutor(4) as threads:
                assert sum(threads.map(end, range(4), backends)) == 1

    def test_parts_of_a_chord_that_nobody_started_are_no_chord(self, stores: Stores) -> None:
        assert stores().add_chord_part(part(0)) is None

    def test_a_chord_that_grows_waits_for_one_part_more(self, stores: Stores) -> None:
        one, other = stores(), stores()
        one.start_chord("g", 1)
        other.grow_chord("g", "task-1")
        assert one.add_chord_part(part(0)) is None
        assert payloads(one.add_chord_part(part(1))) == [b"0", b"10"]

    def test_a_chord_grows_once_for_each_task(self, stores: Stores) -> None:
        """The task that adds it may be redelivered, before and after the part has ended."""
        backend = stores()
        backend.start_chord("g", 1)
        backend.grow_chord("g", "task-1")
        backend.grow_chord("g", "task-1")
        assert backend.add_chord_part(part(1)) is None
        backend.grow_chord("g", "task-1")
        assert payloads(backend.add_chord_part(part(0))) == [b"0", b"10"]

    def test_a_chord_that_has_ended_does_not_grow(self, stores: Stores) -> None:
        backend = stores()
        backend.start_chord("g", 1)
        backend.end_chord("g", ())
        backend.grow_chord("g", "task-1")
        assert backend.add_chord_part(part(0)) is None

    def test_a_group_is_kept_until_it_is_forgotten(self, stores: Stores) -> None:
        one, other = stores(), stores()
        assert one.read_group("g") is None
        one.save_group("g", b'{"result":1}')
        one.save_group("g", b'{"result":2}')
        assert other.read_group("g") == b'{"result":2}'
        assert one.read(["g"]) == {}
        other.forget_group("g")
        assert one.read_group("g") is None
