"""What `limits.lua` does, step by step: who starts, who waits, who is called, and what the data has then."""

import json
import random

import pytest
from hiredis import ReplyError

from tests.brokers.redis_scripts import ADA, BOB, EPOCH, LEASE_S, PREFIX, Scripts, at_step
from tests.servers.redis import RedisServer
from umbel.protocol.delivery.limits import Pace

BUCKET = "t:k"
FIELD = f"{EPOCH}:{{}}:{PREFIX}q"


@pytest.fixture
def scripts(redis_server: RedisServer, redis_url: str) -> Scripts:
    return Scripts(redis_server)


def field(place: int) -> str:
    return FIELD.format(place)


def take(
    scripts: Scripts,
    *places: int,
    owner: str = ADA,
    most: object = 1,
    pace: Pace | None = None,
    bucket: str = BUCKET,
    epoch: str = EPOCH,
) -> dict[int, bytes | None]:
    """Those that may not start, and why; the first place is 1, as `hold` has it."""
    interval_s, slack_s = (pace.interval_s, pace.slack_s) if pace else (0, 0)
    args = [
        part
        for place in places
        for part in (field(place), f"id{place}", bucket, 0 if pace else most, interval_s, slack_s)
    ]
    reply = scripts.run("limit", "take", LEASE_S, owner, epoch, *args)
    return {places[reply[at]]: reply[at + 1] for at in range(0, len(reply), 2)}


def free(scripts: Scripts, *places: int, owner: str = ADA) -> int:
    args = [part for place in places for part in (field(place), BUCKET)]
    called: int = scripts.run("limit", "free", LEASE_S, owner, *args)
    return called


def sweep(scripts: Scripts) -> int:
    called: int = scripts.run("limit", "sweep", LEASE_S)
    return called


def waiting(scripts: Scripts, bucket: str = BUCKET) -> list[bytes]:
    """The first is the next."""
    return scripts.waiting(f"umbel.waiting.{bucket}")


def entry(place: int, envelope: str) -> bytes:
    return f"3:id{place}{field(place)}\0{envelope}".encode()


def slots(scripts: Scripts) -> dict[bytes, float]:
    flat = scripts.ask("ZRANGE", f"umbel.slots.{BUCKET}", 0, -1, "WITHSCORES")
    return {member: float(score) for member, score in zip(flat[::2], flat[1::2], strict=True)}


def holder(place: int, owner: str = ADA) -> bytes:
    return f"{owner}\n{field(place)}".encode()


def test_who_finds_a_slot_holds_it_and_the_others_wait_in_order(scripts: Scripts) -> None:
    scripts.hold(_1="a", _2="b", _3="c", _4="d")
    assert take(scripts, 1, 2, 3, 4, most=2) == {3: b"", 4: b""}
    assert slots(scripts) == {holder(1): float("inf"), holder(2): float("inf")}
    assert waiting(scripts) == [entry(3, "c"), entry(4, "d")]
    assert set(scripts.held()) == {b"epoch", field(1).encode(), field(2).encode()}
    assert scripts.ask("HGETALL", "umbel.waits") == [b"q", b"2"]
    assert scripts.ask("HGETALL", f"umbel.held.{ADA}") == [
        *(field(1).encode(), BUCKET.encode()),
        *(field(2).encode(), BUCKET.encode()),
    ]
    assert scripts.ask("SMEMBERS", "umbel.holders") == [ADA.encode()]
    looked_at = float(scripts.ask("ZSCORE", "umbel.limits", BUCKET))
    assert looked_at == pytest.approx(scripts.now + LEASE_S, abs=5)
    assert scripts.ask("PTTL", f"umbel.limit.{BUCKET}") == -1
    assert scripts.ask("PTTL", f"umbel.slots.{BUCKET}") == -1
    assert scripts.waiting("q") == []


def test_a_free_slot_calls_the_next_first_in_line_and_keeps_its_place(scripts: Scripts) -> None:
    scripts.hold(_1="a", _2="b", _3="c")
    take(scripts, 1, 2, 3, most=1)
    scripts.fill("q", "later")
    scripts.ask("HDEL", f"umbel.inflight.{ADA}", field(1))
    assert free(scripts, 1) == 1
    assert scripts.waiting("q") == [b"b", b"later"]
    assert waiting(scripts) == [entry(3, "c")]
    assert scripts.ask("HGETALL", "umbel.waits") == [b"q", b"1"]
    ((called, until),) = slots(scripts).items()
    assert called == b"\nid2"
    assert until == pytest.approx(scripts.now + 3 * LEASE_S, abs=5)
    assert scripts.ask("EXISTS", f"umbel.held.{ADA}") == 0
    scripts.hold(BOB, _5="new", _2="b")
    assert take(scripts, 5, 2, owner=BOB) == {5: b""}  # the place is kept for who was called
    assert slots(scripts) == {holder(2, BOB): float("inf")}
    assert waiting(scripts) == [entry(3, "c"), entry(5, "new")]


def test_a_bucket_that_nobody_waits_for_is_forgotten(scripts: Scripts) -> None:
    scripts.hold(_1="a", _2="b")
    take(scripts, 1)
    assert 0 < scripts.ask("PTTL", f"umbel.limit.{BUCKET}") <= LEASE_S * 1000
    assert scripts.ask("PTTL", f"umbel.slots.{BUCKET}") == -1  # somebody holds it, however long
    assert free(scripts, 1) == 0
    take(scripts, 2, pace=Pace(1000.0, 1.0), bucket="t:r")
    ttl = scripts.ask("PTTL", "umbel.limit.t:r")
    assert 950_000 < ttl <= 1_001_000
    found = scripts.keys()
    left = {key for key in found if "umbel.inflight" not in key}
    assert left == {f"{PREFIX}umbel.limit.{BUCKET}", f"{PREFIX}umbel.limit.t:r", f"{PREFIX}umbel.holders"}
    assert sweep(scripts) == 0
    assert scripts.ask("EXISTS", "umbel.holders") == 0


def test_a_claim_that_is_gone_frees_its_slot_in_the_next_sweep(scripts: Scripts) -> None:
    scripts.hold(_1="a", _2="b", _3="c")
    take(scripts, 1, 2, 3, most=2)
    assert sweep(scripts) == 0
    assert set(slots(scripts)) == {holder(1), holder(2)}
    scripts.ask("HDEL", f"umbel.inflight.{ADA}", field(2))
    assert sweep(scripts) == 1
    assert scripts.waiting("q") == [b"c"]
    assert set(slots(scripts)) == {holder(1), b"\nid3"}
    scripts.ask("DEL", f"umbel.inflight.{ADA}")
    assert sweep(scripts) == 0
    assert set(slots(scripts)) == {b"\nid3"}
    sweep(scripts)
    assert scripts.ask("EXISTS", "umbel.holders") == 0


def test_a_call_that_nobody_answers_is_forgotten_by_a_sweep_or_by_who_comes(scripts: Scripts) -> None:
    for is_swept in (True, False):
        scripts.ask("DEL", f"umbel.slots.{BUCKET}", PREFIX + f"umbel.waiting.{BUCKET}", PREFIX + "q")
        scripts.hold(_1="a", _2="b", _3="c", _4="d")
        take(scripts, 1, 2, 3)
        free(scripts, 1)
        scripts.ask("ZADD", f"umbel.slots.{BUCKET}", 1, "\nid2")
        if is_swept:
            assert sweep(scripts) == 0  # its time has not come
            scripts.ask("ZADD", "umbel.limits", 1, BUCKET)
            assert sweep(scripts) == 1
            assert set(slots(scripts)) == {b"\nid3"}
            assert scripts.ask("ZSCORE", "umbel.limits", BUCKET) is None
        else:
            assert take(scripts, 4) == {}
            assert set(slots(scripts)) == {holder(4)}


def test_one_that_will_not_start_passes_its_turn_on_and_no_other(scripts: Scripts) -> None:
    scripts.hold(_1="a", _2="b", _3="c")
    take(scripts, 1, 2, 3)
    assert take(scripts, 3, most="ends") == {}  # it was not called
    assert set(slots(scripts)) == {holder(1)}
    free(scripts, 1)
    assert take(scripts, 2, most="ends") == {}
    assert set(slots(scripts)) == {b"\nid3"}
    assert scripts.waiting("q") == [b"c", b"b"]


def test_a_claim_that_has_ended_may_not_start_and_does_not_wait(scripts: Scripts) -> None:
    scripts.hold(_1="a")
    assert take(scripts, 1, epoch="n.0") == {1: None}
    assert take(scripts, 2) == {2: None}
    assert (slots(scripts), waiting(scripts)) == ({}, [])
    assert set(scripts.held()) == {b"epoch", field(1).encode()}


def test_a_key_of_another_type_refuses_its_own_bucket_with_the_reason(scripts: Scripts) -> None:
    for kind, name in (("zset", "slots"), ("list", "waiting"), ("hash", "limit")):
        scripts.hold(_1="a", _2="b")
        scripts.ask("SET", f"umbel.{name}.t:broken", "x")
        (why,) = take(scripts, 1, bucket="t:broken").values()
        assert why and f"umbel.{name}.t:broken' holds a string, not a {kind}".encode() in why
        assert field(1).encode() in scripts.held()
        take(scripts, 1, most="ends", bucket="t:broken")
        scripts.ask("DEL", f"umbel.{name}.t:broken")
    for kind, name in (
        ("hash", f"inflight.{ADA}"),
        ("hash", f"held.{ADA}"),
        ("set", "holders"),
        ("zset", "limits"),
    ):
        scripts.ask("DEL", f"umbel.{name}")
        scripts.ask("SET", f"umbel.{name}", "x")
        with pytest.raises(ReplyError, match=f"not a {kind}"):
            take(scripts, 2)
        scripts.ask("DEL", f"umbel.{name}")
    scripts.ask("SET", f"umbel.held.{ADA}", "x")
    with pytest.raises(ReplyError, match="not a hash"):
        free(scripts, 1)


def test_a_pace_calls_each_when_it_is_due_and_those_soon_due_ahead(scripts: Scripts) -> None:
    slow, quick = Pace(100.0, 1.0), Pace(0.4, 0.1)
    scripts.hold(_1="a", _2="b", _3="c", _4="d", _5="e")
    assert take(scripts, 1, 2, 3, pace=slow) == {2: b"", 3: b""}
    now = scripts.now
    ((member, due),) = scripts.delayed("q")
    assert member == f"{field(2)}\0b".encode()
    assert due == pytest.approx(now + 99, abs=5)
    assert slots(scripts)[b"\nid2"] == pytest.approx(due + 3 * LEASE_S, abs=0.01)
    assert scripts.ask("PTTL", f"umbel.slots.{BUCKET}") == pytest.approx((100 + 3 * LEASE_S) * 1000, abs=6000)
    assert waiting(scripts) == [entry(3, "c")]
    assert float(scripts.ask("HGET", f"umbel.limit.{BUCKET}", "free_at")) == pytest.approx(due + 1, abs=0.01)
    scripts.ask("DEL", "umbel.delayed.q")
    scripts.ask("DEL", f"umbel.waiting.{BUCKET}")
    scripts.ask("DEL", f"umbel.slots.{BUCKET}")
    scripts.ask("DEL", f"umbel.limit.{BUCKET}")
    scripts.hold(_2="b", _3="c", _4="d")
    assert set(take(scripts, 2, 3, 4, 5, pace=quick)) == {3, 4, 5}
    dues = [due for _, due in scripts.delayed("q")]
    assert len(dues) == 2  # within a second: two intervals
    assert dues[1] - dues[0] == pytest.approx(0.4, abs=0.01)
    assert waiting(scripts) == [entry(5, "e")]


def test_who_was_called_too_early_waits_first_and_who_comes_new_last(scripts: Scripts) -> None:
    pace = Pace(100.0, 1.0)
    scripts.hold(_1="a", _2="b", _3="c")
    take(scripts, 1, 2, 3, pace=pace)
    scripts.hold(BOB, _2="b")
    assert take(scripts, 2, owner=BOB, pace=pace) == {2: b""}
    assert [member for member, _ in scripts.delayed("q")][:1] == [f"{field(2)}\0b".encode()]
    assert waiting(scripts) == [entry(3, "c")]
    scripts.ask("HSET", f"umbel.limit.{BUCKET}", "free_at", scripts.now + 0.5)
    scripts.hold(BOB, _2="b")
    assert take(scripts, 2, owner=BOB, pace=pace) == {}  # within the slack


def test_the_script_keeps_the_pace_that_the_decision_has(scripts: Scripts) -> None:
    chance = random.Random(7)
    for number in range(60):
        pace = Pace(chance.uniform(0.5, 200.0), chance.uniform(0.0, 5.0))
        now = scripts.now
        free_at = now + chance.uniform(-3.0, 1.5 * (pace.interval_s + pace.slack_s))
        if abs(free_at - pace.slack_s - now) < 0.5:
            continue  # the clock goes on meanwhile
        bucket = f"t:{number}"
        scripts.ask("HSET", f"umbel.limit.{bucket}", "free_at", f"{free_at:.6f}")
        scripts.hold(_1="a")
        expected = pace.take(free_at, now)
        assert (take(scripts, 1, pace=pace, bucket=bucket) == {}) is (expected is not None)
        if expected is not None:
            found = float(scripts.ask("HGET", f"umbel.limit.{bucket}", "free_at"))
            assert found == pytest.approx(expected, abs=0.4)
        else:
            ((_, due),) = scripts.delayed("q")
            assert due == pytest.approx(pace.due(free_at, now, 0), abs=0.4)
            scripts.ask("DEL", "umbel.delayed.q")


def test_what_cannot_go_back_to_its_queue_is_among_the_dead_letters_or_stays(scripts: Scripts) -> None:
    scripts.hold(_1="a", _2="b")
    take(scripts, 1, 2)
    scripts.ask("SET", "q", "x")
    scripts.ask("SET", "umbel.dead", "x")
    assert free(scripts, 1) == 1
    assert waiting(scripts) == [entry(2, "b")]
    assert slots(scripts) == {}
    assert scripts.ask("HGETALL", "umbel.waits") == [b"q", b"1"]
    scripts.ask("DEL", "umbel.dead")
    assert free(scripts, 1) == 1
    assert waiting(scripts) == []
    assert scripts.ask("XLEN", "umbel.dead") == 1


def test_what_waits_in_a_paused_queue_goes_back_to_it_and_the_next_is_called(scripts: Scripts) -> None:
    def other(place: int) -> str:
        return f"{len(str(place))}:{place}{EPOCH}:{place}:{PREFIX}other\0{place}"

    scripts.hold(_1="a")
    take(scripts, 1)
    scripts.ask("HSET", "umbel.paused", "other", "{}")
    scripts.ask("HSET", "umbel.waits", "other", 1001, "q", 1)
    scripts.fill("other", "later")
    scripts.ask("LPUSH", f"umbel.waiting.{BUCKET}", *map(other, range(1001)), entry(2, "b"))
    assert free(scripts, 1) == 0  # so many at once, and no more
    assert slots(scripts) == {}
    assert scripts.waiting("other") == [*(str(place).encode() for place in range(1000)), b"later"]
    assert waiting(scripts) == [other(1000).encode(), entry(2, "b")]
    assert free(scripts, 1) == 1
    assert (scripts.waiting("q"), waiting(scripts)) == ([b"b"], [])
    assert set(slots(scripts)) == {b"\nid2"}
    assert scripts.waiting("other")[0] == b"1000"
    assert scripts.ask("EXISTS", "umbel.waits") == 0


def test_what_others_wrote_is_called_in_its_turn_and_ends_as_a_dead_letter(scripts: Scripts) -> None:
    scripts.ask("LPUSH", f"umbel.waiting.{BUCKET}", "junk", "9:x", "1:")
    scripts.ask("ZADD", "umbel.limits", 1, BUCKET)
    for _ in range(3):
        assert sweep(scripts) == 1
        scripts.ask("DEL", f"umbel.slots.{BUCKET}")
        scripts.ask("ZADD", "umbel.limits", 1, BUCKET)
    assert scripts.ask("XLEN", "umbel.dead") == 3


def test_what_waits_is_purged_by_its_queue(scripts: Scripts) -> None:
    other = f"{EPOCH}:9:{PREFIX}other"
    scripts.hold(_1="a", _2="b", _3="c")
    scripts.ask("HSET", f"umbel.inflight.{ADA}", other, "o")
    take(scripts, 1, 2, 3)
    scripts.run(
        *("limit", "take", LEASE_S, ADA, EPOCH),
        *(other, "id9", BUCKET, 1, 0, 0),
    )
    assert purge_limited(scripts, "q") == [2, 1]
    assert waiting(scripts) == [f"3:id9{other}\0o".encode()]
    assert scripts.ask("HGETALL", "umbel.waits") == [b"other", b"1"]
    assert purge_limited(scripts, "q") == [0, 1]
    assert purge_limited(scripts, "other") == [1, 1]
    assert scripts.ask("EXISTS", "umbel.limits") == 0


def purge_limited(scripts: Scripts, queue: str, *buckets: str) -> list[int]:
    """How many messages were removed, and how many of the buckets are done."""
    reply: list[int] = scripts.run("purge", "limited", LEASE_S, queue, *(buckets or (BUCKET,)))
    return reply


def purge_rest(scripts: Scripts, queue: str = "q") -> list[int]:
    """How many were removed, and whether there may be more."""
    reply: list[int] = scripts.run("purge", "rest", LEASE_S, queue)
    return reply


def holding(number: int = 1, size: int = 0, /, **headers: str) -> bytes:
    """An envelope of a message that holds something."""
    said = {"task": "t", "id": f"id{number}", **headers}
    return json.dumps({"body": "x" * size, "headers": said, "properties": {}}).encode()


def test_what_is_purged_frees_the_keys_and_turns_that_it_holds_and_no_other(scripts: Scripts) -> None:
    for number, key in enumerate("abcd", 1):
        scripts.run("unique", "hold", key, f"id{number}", 60_000)
    three = at_step("q", 3)
    scripts.fill("q", holding(1, umbel_unique="a"), "junk", '{"headers": {"umbel_unique": 3}}', holding())
    scripts.fill(three, marked_holding(2, umbel_unique="b"), holding(9, umbel_unique="d"))
    scripts.fill("other", holding(4, umbel_unique="d"))
    scripts.delay("q", scripts.now + 60, b"t:1:P:q\0" + holding(3, umbel_unique="c"))
    scripts.delay("q", scripts.now + 60, '{"umbel_limit"')
    assert purge_rest(scripts) == [8, 0]
    assert scripts.keys() == {"P:umbel.unique.d", "P:umbel.holding", "P:other"}
    assert scripts.ask("EXISTS", "q") == scripts.ask("EXISTS", "umbel.delayed.q") == 0
    assert scripts.ask("LLEN", "other") == 1
    assert purge_rest(scripts) == [0, 0]


def marked_holding(number: int, **headers: str) -> bytes:
    return b'{"umbel": {"starts": 1}, ' + holding(number, **headers)[1:]


@pytest.mark.parametrize("is_delayed", [False, True])
def test_a_message_that_is_purged_in_its_turn_passes_it_on(scripts: Scripts, is_delayed: bool) -> None:
    second = holding(2, umbel_limit="k")
    scripts.hold(_1=holding(1, umbel_limit="k"), _2=second, _3=holding(3, umbel_limit="k"))
    take(scripts, 1, 2, 3)
    assert free(scripts, 1) == 1
    scripts.ask("HDEL", f"umbel.inflight.{ADA}", field(1))
    assert scripts.waiting("q") == [second]
    assert scripts.ask("EXISTS", "umbel.holding") == 1
    scripts.ask("RENAME", "q", f"{PREFIX}elsewhere")  # that of the third stays
    if is_delayed:
        scripts.delay("elsewhere", scripts.now + 1, b"t:1:P:elsewhere\0" + second)
        scripts.ask("DEL", "elsewhere")
    assert purge_rest(scripts, "elsewhere") == [1, 0]
    assert scripts.waiting("q") == [holding(3, umbel_limit="k")]
    assert scripts.ask("ZRANGE", f"umbel.slots.{BUCKET}", 0, -1) == [b"\nid3"]


def test_a_purge_is_done_in_portions_by_count_and_by_size(scripts: Scripts) -> None:
    scripts.run("unique", "hold", "k", "id1100", 60_000)
    scripts.fill("q", *(holding(number, umbel_unique="k") for number in range(1, 1101)))
    assert [purge_rest(scripts) for _ in range(3)] == [[500, 1], [500, 1], [100, 0]]
    assert scripts.ask("EXISTS", "umbel.unique.k") == 0
    scripts.fill("q", *(holding(number, 400_000) for number in range(4)))
    assert [purge_rest(scripts) for _ in range(2)] == [[3, 1], [1, 0]]
    for number in range(2):
        scripts.delay("q", 1, b"t:1:P:q\0" + holding(number, 1_000_000))
    assert [purge_rest(scripts) for _ in range(3)] == [[1, 1], [1, 1], [0, 0]]


def test_what_waits_for_limits_is_purged_in_portions_too(scripts: Scripts) -> None:
    entries = [f"3:id1{field(1)}\0".encode() + holding(1) for _ in range(750)]
    for name in ("a", "b"):
        scripts.ask("LPUSH", f"umbel.waiting.{name}", *entries)
        scripts.ask("HINCRBY", "umbel.waits", "q", 750)
    scripts.ask("SET", "umbel.waiting.bad", "no list")
    assert purge_limited(scripts, "q", "bad", "a", "b") == [500, 1]
    assert purge_limited(scripts, "q", "a", "b") == [500, 1]
    assert scripts.ask("HGET", "umbel.waits", "q") == b"500"
    assert purge_limited(scripts, "q", "b") == [500, 0]
    assert purge_limited(scripts, "q", "b") == [0, 1]
    assert scripts.ask("EXISTS", "umbel.waits") == 0


def test_where_nothing_can_be_held_no_message_is_looked_at(scripts: Scripts) -> None:
    """And what somebody has made of another type goes as well."""
    scripts.fill("q", *([holding(1, umbel_unique="k")] * 1500))
    scripts.delay("q", 1, "a")
    scripts.ask("SET", "umbel.unique.k", "id1")  # of a sender of 0.3, which makes no note
    scripts.ask("SET", at_step("q", 3), "no list")
    assert purge_rest(scripts) == [1501, 0]
    assert scripts.keys() == {"P:umbel.unique.k"}
    scripts.ask("SET", "umbel.holding", "")
    scripts.ask("SET", at_step("q", 3), "no list")
    scripts.ask("SET", "umbel.delayed.q", "no zset")
    scripts.fill("q", "a")
    assert purge_rest(scripts) == [1, 0]
    assert scripts.keys() == {"P:umbel.unique.k", "P:umbel.holding"}
