"""What the scripts of the other stores do, one by one: revokes, events, results, chords, keys, depths."""

import pytest
from hiredis import ReplyError

from tests.brokers.redis_scripts import ADA, PREFIX, Scripts, marked
from tests.servers.redis import RedisServer


@pytest.fixture
def scripts(redis_server: RedisServer, redis_url: str) -> Scripts:
    return Scripts(redis_server)


# -- revokes -----------------------------------------------------------------------------------------


def record(scripts: Scripts, *names: str, limit: int = 10, expires_at: object = "4e9", text: str = "") -> int:
    parts = [part for name in names for part in (name, expires_at, f"{name}{text}")]
    reply: int = scripts.run("revoke", "record", limit, *parts)
    return reply


def order(scripts: Scripts) -> list[bytes]:
    found: list[bytes] = scripts.ask("ZRANGE", "umbel.revokes.order", 0, -1)
    return found


def cursors(scripts: Scripts) -> list[int]:
    flat = scripts.ask("ZRANGE", "umbel.revokes.order", 0, -1, "WITHSCORES")
    return [int(float(score)) for score in flat[1::2]]


def test_revokes_are_recorded_in_order_with_cursors_that_rise(scripts: Scripts) -> None:
    before = int(scripts.now * 1e6)
    assert record(scripts, "a", "b") == 2
    assert record(scripts, "c") == 1
    assert order(scripts) == [b"a", b"b", b"c"]
    found = cursors(scripts)
    assert before <= found[0] <= int(scripts.now * 1e6)
    assert found[1] == found[0] + 1 and found[2] > found[1]
    assert int(scripts.ask("GET", "umbel.revokes.cursor")) == found[2]
    assert scripts.ask("HGETALL", "umbel.revokes")[:4] == [b"a", b"a", b"b", b"b"]


def test_the_cursor_rises_also_when_the_clock_was_set_back(scripts: Scripts) -> None:
    ahead = int(scripts.now * 1e6) + 10**12
    scripts.ask("SET", "umbel.revokes.cursor", ahead)
    record(scripts, "a", "b")
    assert cursors(scripts) == [ahead + 1, ahead + 2]
    scripts.ask("SET", "umbel.revokes.cursor", "first")
    record(scripts, "c")
    assert int(scripts.ask("GET", "umbel.revokes.cursor")) == pytest.approx(scripts.now * 1e6, abs=1e7)


def test_a_revoke_recorded_again_replaces_the_one_before(scripts: Scripts) -> None:
    record(scripts, "a", "b")
    assert record(scripts, "a", text=" again") == 1
    assert order(scripts) == [b"b", b"a again"]
    assert scripts.ask("HGET", "umbel.revokes", "a") == b"a again"


def test_a_full_record_takes_no_more_until_some_may_be_forgotten(scripts: Scripts) -> None:
    assert record(scripts, "a", "b", limit=3) == 2
    assert record(scripts, "c", "d", limit=3) == -1
    assert order(scripts) == [b"a", b"b"]
    assert record(scripts, "c", "a", "c", limit=3, text=" again") == 3  # two of them are known
    assert record(scripts, "b", limit=3, expires_at="1") == 1  # as if its time were over
    assert record(scripts, "d", limit=3) == 1
    assert set(order(scripts)) == {b"a again", b"c again", b"d"}


def test_what_may_be_forgotten_is_swept_in_parts(scripts: Scripts) -> None:
    record(scripts, "kept")
    record(scripts, "a", expires_at="-5")
    record(scripts, "b", "c", expires_at=f"{scripts.now - 5:.0f}")
    assert scripts.run("revoke", "sweep", 2) == 2
    assert len(order(scripts)) == 2
    assert scripts.run("revoke", "sweep", 2) == 1
    assert scripts.run("revoke", "sweep", 2) == 0
    assert (order(scripts), scripts.ask("HKEYS", "umbel.revokes")) == ([b"kept"], [b"kept"])
    assert scripts.ask("ZRANGE", "umbel.revokes.expiry", 0, -1, "WITHSCORES") == [b"kept", b"4000000000"]


@pytest.mark.parametrize("never", ["soon", "nan"])
def test_a_revoke_without_an_end_is_refused_and_nothing_recorded(scripts: Scripts, never: str) -> None:
    with pytest.raises(ReplyError, match=f"^(ERR )?REFUSED a revoke that expires at {never} "):
        record(scripts, "a", expires_at=never)
    assert scripts.keys() == set()


# -- the event log -------------------------------------------------------------------------------------


def append(scripts: Scripts, *keys: str, most: int = 100, events: int = 1) -> int:
    """`events`: how many each of the entries holds."""
    parts = [part for key in keys for part in (key, events, f"body of {key}")]
    reply: int = scripts.run("event_log", "append", most, *parts)
    return reply


def logged(scripts: Scripts) -> list[tuple[bytes, bytes]]:
    return [(offset, entry[3]) for offset, entry in scripts.ask("XRANGE", "umbel.events", "-", "+")]


def register(scripts: Scripts, name: str) -> int:
    reply: int = scripts.run("event_log", "register", name)
    return reply


def acknowledge(scripts: Scripts, name: str, offset: int) -> None:
    assert scripts.run("event_log", "acknowledge", name, offset) == 1


def test_events_are_kept_for_recorders_with_offsets_without_gaps(scripts: Scripts) -> None:
    assert append(scripts, "nobody's") == 0
    assert register(scripts, "lake") == 0
    assert append(scripts, "a", "b") == 2
    assert append(scripts, "c") == 1
    assert logged(scripts) == [(b"1-0", b"a"), (b"2-0", b"b"), (b"3-0", b"c")]
    (_, entry), *_ = scripts.ask("XRANGE", "umbel.events", "-", "+")
    assert entry[::2] == [b"at", b"key", b"body"] and entry[5] == b"body of a"
    assert float(entry[1]) == pytest.approx(scripts.now, abs=10)
    assert len(entry[1].partition(b".")[2]) == 6
    assert scripts.ask("GET", "umbel.events.offset") == b"3"
    assert (register(scripts, "late"), register(scripts, "lake")) == (3, 0)


def test_what_every_recorder_has_acknowledged_goes(scripts: Scripts) -> None:
    for name in ("lake", "other"):
        register(scripts, name)
    append(scripts, "a", "b", "c", "d")
    acknowledge(scripts, "lake", 3)
    assert len(logged(scripts)) == 4
    acknowledge(scripts, "other", 2)
    assert logged(scripts) == [(b"3-0", b"c"), (b"4-0", b"d")]
    acknowledge(scripts, "other", 1)  # a reply that was late
    assert scripts.ask("HGETALL", "umbel.recorders") == [b"lake", b"3", b"other", b"2"]
    acknowledge(scripts, "stranger", 4)
    assert scripts.ask("HLEN", "umbel.recorders") == 2
    acknowledge(scripts, "other", 4)
    assert logged(scripts) == [(b"4-0", b"d")]


def test_an_acknowledgement_that_cannot_be_read_is_none(scripts: Scripts) -> None:
    register(scripts, "lake")
    append(scripts, "a", "b")
    scripts.ask("HSET", "umbel.recorders", "lake", "all", "other", "1")
    assert register(scripts, "lake") == 0
    acknowledge(scripts, "other", 2)
    assert len(logged(scripts)) == 2
    acknowledge(scripts, "lake", 1)
    assert logged(scripts) == [(b"2-0", b"b")]


def test_offsets_go_on_when_everything_was_acknowledged(scripts: Scripts) -> None:
    register(scripts, "lake")
    append(scripts, "a", "b")
    acknowledge(scripts, "lake", 2)
    assert logged(scripts) == []
    append(scripts, "c")
    assert logged(scripts) == [(b"3-0", b"c")]


def test_an_entry_of_several_events_has_the_offset_of_its_last_and_goes_whole(scripts: Scripts) -> None:
    register(scripts, "lake")
    append(scripts, "a", "b", events=3, most=5)
    assert logged(scripts) == [(b"3-0", b"a"), (b"6-0", b"b")]  # 2 to 6 are to be kept, and a has 2 and 3
    assert scripts.ask("EXISTS", "umbel.events.lost") == 0
    append(scripts, "c", events=2, most=5)
    assert logged(scripts) == [(b"6-0", b"b"), (b"8-0", b"c")]
    assert scripts.ask("GET", "umbel.events.lost") == b"3"
    scripts.ask("HSET", "umbel.recorders", "lake", 5)
    append(scripts, "d", events=6, most=5)  # of b only 6 was not read
    assert logged(scripts) == [(b"14-0", b"d")]
    assert scripts.ask("GET", "umbel.events.lost") == b"6"


@pytest.mark.parametrize("lost", [("DEL",), ("SET", "none")])
def test_a_lost_offset_is_read_from_the_last_event(scripts: Scripts, lost: tuple[str, ...]) -> None:
    register(scripts, "lake")
    append(scripts, "a", "b")
    command, *value = lost
    scripts.ask(command, "umbel.events.offset", *value)
    append(scripts, "c")
    assert [offset for offset, _ in logged(scripts)] == [b"1-0", b"2-0", b"3-0"]


def test_at_the_limit_the_oldest_go_and_what_nobody_read_is_counted(scripts: Scripts) -> None:
    register(scripts, "lake")
    assert append(scripts, "a", "b", "c", "d", most=4) == 4
    assert scripts.ask("EXISTS", "umbel.events.lost") == 0
    append(scripts, "e", most=4)
    assert (len(logged(scripts)), scripts.ask("GET", "umbel.events.lost")) == (4, b"1")
    register(scripts, "late")
    scripts.ask("HSET", "umbel.recorders", "lake", 3, "late", 5)
    append(scripts, "f", "g", most=3)  # 2, 3 and 4 go: only 4 was not read by all
    assert [offset for offset, _ in logged(scripts)] == [b"5-0", b"6-0", b"7-0"]
    assert scripts.ask("GET", "umbel.events.lost") == b"2"
    scripts.ask("HSET", "umbel.recorders", "lake", 7, "late", 7)
    append(scripts, "h", most=2)
    assert scripts.ask("GET", "umbel.events.lost") == b"2"
    assert len(logged(scripts)) == 2


def test_old_events_that_all_have_read_are_swept(scripts: Scripts) -> None:
    register(scripts, "lake")
    for offset, at in ((1, 10.0), (2, 20.0), (3, 30.0), (4, 40.0), (5, 50.0)):
        scripts.ask("XADD", "umbel.events", f"{offset}-0", "at", at, "key", "k", "body", "b")
    scripts.ask("SET", "umbel.events.offset", 5)

    def sweep(older_than: float, most: int = 100) -> int:
        reply: int = scripts.run("event_log", "sweep", older_than, most)
        return reply

    assert sweep(100.0) == 0  # nobody has read them
    scripts.ask("HSET", "umbel.recorders", "lake", 4)
    assert sweep(5.0) == 0
    assert sweep(100.0, most=1) == 1
    assert sweep(30.0) == 2
    assert [offset for offset, _ in logged(scripts)] == [b"4-0", b"5-0"]
    assert sweep(100.0) == 1
    scripts.ask("DEL", "umbel.events")
    scripts.ask("XADD", "umbel.events", "1-0", "at", "some day", "key", "k", "body", "b")
    assert sweep(5.0) == 1  # who knows how old it is


# -- keys of unique tasks --------------------------------------------------------------------------------


def test_a_key_is_held_by_the_first_until_it_gives_it_back(scripts: Scripts) -> None:
    assert scripts.run("unique", "hold", "k", "one", 60_000) == b"one"
    assert scripts.run("unique", "hold", "k", "two", 90_000) == b"one"
    assert 50_000 < scripts.ask("PTTL", "umbel.unique.k") <= 60_000
    scripts.run("unique", "hold", "l", "three", 60_000)
    scripts.run("unique", "hold", "m", "four", 60_000)
    scripts.ask("LPUSH", "umbel.unique.n", "not a string")
    pairs = ("k", "two", "l", "three", "n", "five", "m", "four", "gone", "six")
    assert scripts.run("unique", "release", *pairs) == 2
    assert scripts.keys() == {"P:umbel.unique.k", "P:umbel.unique.n", "P:umbel.holding"}
    assert scripts.run("unique", "release", "k", "one") == 1


def test_a_message_that_no_list_takes_back_frees_its_key_among_the_dead_letters(scripts: Scripts) -> None:
    for key in "kl":
        scripts.run("unique", "hold", key, "one", 60_000)
    scripts.hold(_1='{"headers": {"id": "one", "umbel_unique": "k"}}', _2="no envelope")
    scripts.ask("SET", "q", "not a list")
    assert scripts.run("abandon", ADA, 1, "n.1") == 2
    assert len(scripts.letters()) == 2
    assert scripts.ask("EXISTS", "umbel.unique.k") == 0
    assert scripts.ask("EXISTS", "umbel.unique.l") == 1


def test_as_long_as_a_key_may_be_held_there_is_a_note_of_it(scripts: Scripts) -> None:
    scripts.run("unique", "hold", "k", "one", 60_000)
    scripts.run("unique", "hold", "l", "two", 30_000)  # a shorter time shortens nothing
    assert 50_000 < scripts.ask("PTTL", "umbel.holding") <= 60_000
    scripts.run("unique", "hold", "m", "three", 90_000)
    assert 80_000 < scripts.ask("PTTL", "umbel.holding") <= 90_000


# -- signatures that were used ----------------------------------------------------------------------------


def test_a_signature_is_used_by_one_claim_until_that_is_given_back(scripts: Scripts) -> None:
    def spend(*claims: tuple[str, str, str]) -> list[int]:
        parts = [part for claim in claims for part in (*claim, 60_000)]
        reply: list[int] = scripts.run("spend", "", *parts)
        return reply

    scripts.hold("ada", _1="a", _2="b")
    first, second = ("m", "ada", "n.1:1:P:q"), ("m", "ada", "n.1:2:P:q")
    other = ("l", "bob", "n.1:9:P:q")
    assert spend(other, first, second, first) == [2, 3]
    assert scripts.ask("GET", "umbel.signature.m") == b"ada\nn.1:1:P:q"
    assert 50_000 < scripts.ask("PTTL", "umbel.signature.m") <= 60_000
    assert spend(other) == []  # nobody holds its message
    scripts.ask("HDEL", "umbel.inflight.ada", "n.1:1:P:q")
    assert (spend(second), spend(first)) == ([], [0])
    scripts.ask("SET", "umbel.signature.m", "")  # its message has ended
    assert spend(second, other) == [0]


def test_a_signature_of_another_type_is_named(scripts: Scripts) -> None:
    scripts.ask("LPUSH", "umbel.signature.m", "not a string")
    refused = r"^(ERR )?REFUSED the key 'P:umbel\.signature\.m' holds a list, not a string: "
    with pytest.raises(ReplyError, match=refused):
        scripts.run("spend", "", "m", "ada", "n.1:1:P:q", 60_000)


def test_no_signature_is_used_where_the_id_of_the_cluster_is_another_or_lost(scripts: Scripts) -> None:
    claim = ("m", "ada", "n.1:1:P:q", 60_000)
    scripts.hold("ada", _1="a")
    assert scripts.run("spend", "here", *claim) == b""
    for stored, found in ((b"1.5 there", b"there"), (b"odd", b""), (b"1.5 here", [])):
        scripts.ask("SET", "umbel.cluster", stored)
        assert scripts.run("spend", "here", *claim) == found
    assert scripts.ask("EXISTS", "umbel.signature.m") == 1


# -- dead letters ------------------------------------------------------------------------------------------


def test_buried_messages_lie_without_their_marks_and_with_the_reason(scripts: Scripts) -> None:
    assert scripts.run("bury", "", "P:q", marked("a", starts=3), "one", "P:r", "no JSON", "two") == 1
    first, second = scripts.letters()
    assert float(first.pop("at")) == pytest.approx(scripts.now, abs=10)
    assert first == {"list": "P:q", "envelope": '{"body": "a"}', "reason": "one", "starts": "3"}
    assert (second["list"], second["envelope"], second["reason"]) == ("P:r", "no JSON", "two")
    assert second["starts"] == "0"


def test_beyond_their_number_the_oldest_dead_letters_go_and_are_counted(scripts: Scripts) -> None:
    fill = "for _ = 1, 99999 do redis.call('XADD', KEYS[1], '*', 'list', 'old') end"
    scripts._server.ask("EVAL", fill, 1, f"{PREFIX}umbel.dead")
    assert scripts.run("bury", "", "P:q", "a", "why") == 1
    assert scripts.ask("EXISTS", "umbel.dead.dropped") == 0
    assert scripts.run("bury", "", "P:q", "b", "why", "P:q", "c", "why") == 1
    assert scripts.ask("XLEN", "umbel.dead") == 100_000
    assert scripts.ask("GET", "umbel.dead.dropped") == b"2"


def test_failures_are_kept_apart_within_their_number_and_time(scripts: Scripts) -> None:
    old, young = int((scripts.now - 61) * 1000), int((scripts.now - 50) * 1000)
    scripts.ask("XADD", "umbel.failed", f"{old}-1", "reason", "old")
    scripts.ask("XADD", "umbel.failed", f"{young}-1", "reason", "young")
    assert scripts.run("bury", "3 60", "P:q", marked("a", starts=2), "one") == 1
    kept = [
        dict(zip(one[::2], one[1::2], strict=True))
        for _, one in scripts.ask("XRANGE", "umbel.failed", "-", "+")
    ]
    assert [one[b"reason"] for one in kept] == [b"young", b"one"]
    assert (kept[1][b"list"], kept[1][b"envelope"], kept[1][b"starts"]) == (b"P:q", b'{"body": "a"}', b"2")
    assert scripts.ask("EXISTS", "umbel.dead", "umbel.failed.dropped") == 0
    assert scripts.run("bury", "3 60", "P:q", "b", "two", "P:q", "c", "three") == 1
    assert scripts.ask("XLEN", "umbel.failed") == 3
    assert scripts.ask("GET", "umbel.failed.dropped") == b"1"


def test_failures_of_another_type_are_named(scripts: Scripts) -> None:
    scripts.ask("SET", "umbel.failed", "not a stream")
    refused = r"^(ERR )?REFUSED the key 'P:umbel\.failed' holds a string, not a stream: "
    with pytest.raises(ReplyError, match=refused):
        scripts.run("bury", "3 60", "P:q", "a", "one")
    assert scripts.run("bury", "", "P:q", "a", "one") == 1


def test_a_letter_is_sent_once_more_and_goes(scripts: Scripts) -> None:
    scripts.fill("q", "newer")
    letter = scripts.ask("XADD", "umbel.dead", "*", "list", "P:q")
    kept = scripts.ask("XADD", "umbel.dead", "*", "list", "P:q")
    assert scripts.run("requeue", "P:umbel.dead", letter, "P:q", "a") == 1
    assert scripts.run("requeue", "P:umbel.dead", letter, "P:q", "a") == 0
    assert scripts.waiting("q") == [b"newer", b"a"]
    assert [number for number, _ in scripts.ask("XRANGE", "umbel.dead", "-", "+")] == [kept]
    scripts.ask("SET", "bad", "not a list")
    with pytest.raises(ReplyError, match=r"^(ERR )?REFUSED the key 'P:bad' holds a string, not a list"):
        scripts.run("requeue", "P:umbel.dead", kept, "P:bad", "a")
    assert scripts.ask("XLEN", "umbel.dead") == 1
    with pytest.raises(ReplyError, match=r"^(ERR )?REFUSED the key 'P:bad' holds a string, not a stream"):
        scripts.run("requeue", "P:bad", kept, "P:q", "a")
