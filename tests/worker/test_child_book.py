from umbel.worker.delivery.take import ChildTable


def test_children_are_known_by_their_place_and_counted_when_they_are_replaced() -> None:
    book = ChildTable()
    for what, child, pid in (
        ("started", 0, 100),
        ("started", 1, 101),
        ("died", 0, 100),
        ("started", 0, 102),
        ("ended", 1, 101),
        ("died", 0, 100),  # told late, of one that was replaced
    ):
        book.note(what, {"child": child, "pid": pid, "reason": ""})
    book.note("spawning", {"because": "threads"})
    book.note("started", {"child": 2, "pid": None})
    assert (book.pids, book.restarts) == ({0: 102}, {0: 1, 1: 0})
