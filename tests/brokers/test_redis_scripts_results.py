"""What the scripts of results, chords, leases and a full server do, one by one."""

import json

import pytest
from hiredis import ReplyError

from tests.brokers.redis_scripts import ADA, BOB, EPOCH, HOUR_S, LEASE_S, PREFIX, Scripts
from tests.servers.redis import RedisServer, exchange
from umbel.brokers.redis.scripts import script


@pytest.fixture
def scripts(redis_server: RedisServer, redis_url: str) -> Scripts:
    return Scripts(redis_server)


# -- results -----------------------------------------------------------------------------------------

SUCCESS = '{"status": "SUCCESS", "n": %d}'


def test_the_first_success_stays_and_what_came_before_does_not(scripts: Scripts) -> None:
    for payload in ('{"status": "FAILURE"}', SUCCESS % 1, '{"status": "FAILURE"}', SUCCESS % 2):
        assert scripts.run("store", 0, "P:r", payload) == []
    assert scripts.ask("GET", "r") == (SUCCESS % 1).encode()
    assert scripts.ask("PTTL", "r") == -1


@pytest.mark.parametrize(
    ("before", "stays"),
    [
        ('{ "status" : "SUCCESS"}', True),
        ('{"result": 1, "status": "SUCCESS"}', True),
        ('{"result": {"status": "SUCCESS"}, "status": "FAILURE"}', False),
        ('{"status": "RETRY", "x": "SUCCESS"}', False),
        ('"SUCCESS"', False),
        ("no JSON", False),
        ('{"status": 1}', False),
    ],
)
def test_only_a_map_that_says_so_is_a_success(scripts: Scripts, before: str, stays: bool) -> None:
    scripts.ask("SET", "r", before)
    scripts.run("store", 0, "P:r", "{}")
    assert scripts.ask("GET", "r") == (before.encode() if stays else b"{}")


def test_results_have_their_time_and_what_is_refused_is_named_by_its_place(scripts: Scripts) -> None:
    for key in ("b", "d"):
        scripts.ask("LPUSH", key, "not a string")
    parts = [part for key in "abcde" for part in (f"P:{key}", "{}")]
    reply = scripts.run("store", 60_000, *parts)
    why = b"the key 'P:%s' holds a list, not a string: delete or rename it"
    assert reply == [1, why % b"b", 3, why % b"d"]
    for key in "ace":
        assert 50_000 < scripts.ask("PTTL", key) <= 60_000


@pytest.mark.parametrize("forbidden", ["get", "set", "publish"])
def test_what_the_user_may_not_do_is_refused_in_the_words_of_the_server(
    scripts: Scripts, redis_server: RedisServer, forbidden: str
) -> None:
    redis_server.ask("ACL", "SETUSER", "weak", "reset", "on", ">word", "~*", "&*", "+@all", f"-{forbidden}")
    call = ("EVAL", script("store", prefix=PREFIX).text, 0, 0, "P:r", "{}")
    _, reply = exchange(redis_server.port, [("AUTH", "weak", "word"), call])
    assert isinstance(reply, list) and reply[0] == 0
    assert reply[1].startswith(b"the key 'P:r' cannot be used: ") and b"user" in reply[1]


def test_a_user_who_may_not_ask_for_a_type_still_reads_what_is_wrong(
    scripts: Scripts, redis_server: RedisServer
) -> None:
    redis_server.ask("ACL", "SETUSER", "blind", "reset", "on", ">word", "~*", "&*", "+@all", "-type")
    scripts.ask("LPUSH", "r", "not a string")
    call = ("EVAL", script("store", prefix=PREFIX).text, 0, 0, "P:r", "{}")
    _, reply = exchange(redis_server.port, [("AUTH", "blind", "word"), call])
    assert reply == [0, b"the key 'P:r' holds a value, not a string: delete or rename it"]


# -- chords ------------------------------------------------------------------------------------------


def add(scripts: Scripts, place: int, *, mark: str = "", text: str = "") -> list[bytes] | None:
    reply: list[bytes] | None = scripts.run(
        "chord", "add", "P:g", 60, place, mark or f"t:{place}", text or f"part {place}"
    )
    return reply


def start(scripts: Scripts, size: int) -> None:
    assert scripts.run("chord", "start", "P:g", size, 60) == 1


def end(scripts: Scripts, *batch: str) -> list[object] | int:
    reply: list[object] | int = scripts.run("chord", "end", "P:g", 90, *batch)
    return reply


def test_a_chord_is_whole_when_each_part_has_come_once(scripts: Scripts) -> None:
    start(scripts, 3)
    assert 50 < scripts.ask("TTL", "g.s") <= 60
    assert (add(scripts, 10), add(scripts, 2), add(scripts, 2, text="again")) == (None, None, None)
    assert add(scripts, 0) == [b"part 0", b"part 2", b"part 10"]
    assert add(scripts, 0) == [b"part 0", b"part 2", b"part 10"]  # its reply may have been lost
    assert scripts.ask("SMEMBERS", "g.d") and scripts.ask("SCARD", "g.d") == 3
    for key in ("g.s", "g.j", "g.d"):
        assert 50 < scripts.ask("TTL", key) <= 60


def test_parts_that_come_before_the_start_are_kept(scripts: Scripts) -> None:
    assert (add(scripts, 0), add(scripts, 1)) == (None, None)
    start(scripts, 2)
    assert add(scripts, 1) == [b"part 0", b"part 1"]


def test_parts_that_were_added_while_it_ran_are_waited_for(scripts: Scripts) -> None:
    start(scripts, 2)
    scripts.ask("SET", "g.t", 0)
    assert add(scripts, 0) is None
    start(scripts, 1)
    scripts.ask("SET", "g.t", 1)
    assert add(scripts, 0) is None
    assert 50 < scripts.ask("TTL", "g.t") <= 60
    assert add(scripts, 1) == [b"part 0", b"part 1"]


def test_one_claims_the_body_and_whoever_asks_again_is_the_same(scripts: Scripts) -> None:
    claims = [scripts.run("chord", "claim", "P:g", by, 60) for by in ("one", "two", "one")]
    assert claims == [1, 0, 1]
    assert 50 < scripts.ask("TTL", "g.c") <= 60


def test_a_chord_that_has_ended_starts_and_ends_no_more(scripts: Scripts) -> None:
    start(scripts, 1)
    add(scripts, 0)
    scripts.ask("SET", "g.t", 0)
    scripts.fill("q", "first")
    assert end(scripts, "P:q", "body", "P:r", "more") == [1]
    assert (scripts.waiting("q"), scripts.waiting("r")) == ([b"first", b"body"], [b"more"])
    assert scripts.keys() == {"P:g.c", "P:q", "P:r"}
    assert scripts.ask("GET", "g.c") == b"done" and 80 < scripts.ask("TTL", "g.c") <= 90
    start(scripts, 1)
    assert (add(scripts, 0), end(scripts, "P:q", "body")) == (None, 0)
    assert scripts.keys() == {"P:g.c", "P:q", "P:r"}
    assert len(scripts.waiting("q")) == 2


def test_what_is_refused_at_the_end_of_a_chord_is_named_by_its_place(scripts: Scripts) -> None:
    scripts.ask("SET", "bad", "not a list")
    why = b"the key 'P:bad' holds a string, not a list: delete or rename it"
    assert end(scripts, "P:q", "a", "P:bad", "b", "P:q", "c", "P:bad", "d") == [1, 1, why, 3, why]
    assert scripts.waiting("q") == [b"a", b"c"]
    assert [letter["envelope"] for letter in scripts.letters()] == ["b", "d"]


@pytest.mark.parametrize(
    ("key", "problem"),
    [
        ("g.s", "holds no number: delete it"),
        ("g.t", "holds no number: delete it"),
        ("g.j", "holds a string, not a zset"),
        ("g.d", "holds a string, not a set"),
    ],
)
def test_a_key_of_a_chord_that_cannot_be_used_is_named(scripts: Scripts, key: str, problem: str) -> None:
    start(scripts, 2)
    scripts.ask("SET", key, "several")
    with pytest.raises(ReplyError, match=f"^(ERR )?REFUSED the key 'P:{key}' {problem}"):
        add(scripts, 0)
    assert scripts.keys() == {"P:g.s", f"P:{key}"}
    scripts.ask("LPUSH", "g.c", "not a string")
    with pytest.raises(ReplyError, match=r"^(ERR )?REFUSED the key 'P:g.c' holds a list, not a string"):
        start(scripts, 2)


# -- leases ------------------------------------------------------------------------------------------


def lease(scripts: Scripts, now: float, verb: str, *args: object) -> list[object] | int:
    reply: list[object] | int = scripts.run("lease", now, verb, "beat", *args)
    return reply


def test_a_lease_is_fenced_by_its_holder_its_term_and_its_time(scripts: Scripts) -> None:
    term = str(1_000_000_000)
    assert lease(scripts, 1000.0, "read") == [0, b"", b"0", b"0", b""]
    assert lease(scripts, 1000.0, "acquire", ADA, 10) == [1, ADA.encode(), term.encode(), b"10", b""]
    assert lease(scripts, 1001.0, "update", ADA, term, "data") == 1
    wanted = [0, ADA.encode(), term.encode(), b"8.000000", b"data"]
    assert lease(scripts, 1002.0, "acquire", BOB, 10) == wanted == lease(scripts, 1002.0, "read")
    for holder, named in ((BOB, term), (ADA, "1")):
        assert lease(scripts, 1002.0, "renew", holder, named, 10) == 0
    assert lease(scripts, 1002.0, "renew", ADA, term, 10) == 1
    assert lease(scripts, 1011.9, "read") == [0, ADA.encode(), term.encode(), b"0.100000", b"data"]
    assert lease(scripts, 1012.0, "renew", ADA, term, 10) == 0
    assert lease(scripts, 1012.0, "read") == [0, b"", term.encode(), b"0", b"data"]
    assert lease(scripts, 1013.0, "acquire", BOB, 10) == [1, b"bob", b"1013000000", b"10", b"data"]
    assert lease(scripts, 1014.0, "release", BOB, "1013000000") == 1
    assert scripts.ask("HMGET", "{coord}:l:beat", "holder", "expires_at") == [b"", b"0"]
    assert lease(scripts, 1014.0, "read") == [0, b"", b"1013000000", b"0", b"data"]
    assert lease(scripts, 1014.0, "release", "", "1013000000") == 0


def test_who_acquires_its_own_lease_again_keeps_its_term(scripts: Scripts) -> None:
    lease(scripts, 1000.0, "acquire", ADA, 10)
    assert lease(scripts, 1005.0, "acquire", ADA, 10) == [1, b"ada", b"1000000000", b"10", b""]
    assert lease(scripts, 1014.0, "read") == [0, b"ada", b"1000000000", b"1.000000", b""]


def test_a_lease_that_cannot_be_read_is_nobodys_and_terms_rise(scripts: Scripts) -> None:
    scripts.ask("HSET", "{coord}:l:beat", "holder", ADA, "term", "none", "expires_at", "soon")
    assert lease(scripts, 1000.0, "read") == [0, b"", b"0", b"0", b""]
    scripts.ask("HSET", "{coord}:meta", "last_term", 5_000_000_000)
    assert lease(scripts, 1000.0, "acquire", BOB, 10) == [1, b"bob", b"5000000001", b"10", b""]
    scripts.ask("HSET", "{coord}:l:beat", "expires_at", 1)
    assert lease(scripts, 1000.0, "acquire", ADA, 10) == [1, b"ada", b"5000000002", b"10", b""]
    scripts.ask("HSET", "{coord}:meta", "last_term", "none")
    scripts.ask("DEL", "{coord}:l:beat")
    assert lease(scripts, 1000.0, "acquire", ADA, 10) == [1, b"ada", b"1000000000", b"10", b""]
    scripts.ask("DEL", "{coord}:l:beat")
    scripts.ask("HSET", "{coord}:l:beat", "term", "7", "expires_at", "2000")
    assert lease(scripts, 1000.0, "read") == [0, b"", b"7", b"0", b""]


def test_by_the_servers_own_clock_terms_are_its_microseconds(scripts: Scripts) -> None:
    before = scripts.now
    _, _, term, _, _ = scripts.run("lease", "", "acquire", "beat", ADA, 10)
    assert before * 1e6 - 10 <= int(term) <= scripts.now * 1e6 + 10
    until = float(scripts.ask("HGET", "{coord}:l:beat", "expires_at"))
    assert until == pytest.approx(int(term) / 1e6 + 10, abs=0.001)
    born = float(scripts.ask("HGET", "{coord}:meta", "born"))
    assert born == pytest.approx(int(term) / 1e6, abs=0.001)


def test_what_a_leader_sends_is_fenced_and_what_is_refused_is_named_by_its_place(scripts: Scripts) -> None:
    lease(scripts, 1000.0, "acquire", ADA, 10)
    term = "1000000000"
    scripts.ask("SET", "bad", "not a list")
    scripts.ask("SET", "umbel.delayed.bad", "not a zset")
    batch = (
        *("P:q", 0, "t:1:P:q", "a"),
        *("P:bad", 0, "t:2:P:bad", "b"),
        *("P:q", 1000 + HOUR_S, "t:3:P:q", "later"),
        *("P:bad", 1000 + HOUR_S, "t:4:P:bad", "d"),
        *("P:q", 1001.0, "t:5:P:q", "due"),
    )
    assert lease(scripts, 1001.0, "publish", BOB, term, "change", "no", *batch) == 0
    reply = lease(scripts, 1001.0, "publish", ADA, term, "change", "marks", *batch)
    assert isinstance(reply, list) and [reply[0], *reply[1::2]] == [1, 1, 3]
    assert b"'P:bad' holds a string, not a list" in reply[2]  # type: ignore[operator]
    assert b"'P:umbel.delayed.bad' holds a string, not a zset" in reply[4]  # type: ignore[operator]
    assert scripts.waiting("q") == [b"a", b"due"]
    assert scripts.delayed("q") == [(b"t:3:P:q\0later", 1000 + HOUR_S)]
    assert [(letter["list"], letter["envelope"]) for letter in scripts.letters()] == [
        ("P:bad", "b"),
        ("P:bad", "d"),
    ]
    assert scripts.ask("HGET", "{coord}:l:beat", "data") == b"marks"
    assert lease(scripts, 1001.0, "publish", ADA, term, "keep", "other") == [1]
    assert scripts.ask("HGET", "{coord}:l:beat", "data") == b"marks"


# -- a server at its limit of memory -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("claim", (ADA, LEASE_S, EPOCH, 1, 10, 0, 10, "q")),
        ("abandon", (ADA, 4, EPOCH)),
        ("reconcile", (ADA, "0.0", 0)),
        ("spend", ("", "m", ADA, "n.2:1:P:q", 1000)),
        ("adopt", (ADA, EPOCH, "n.2:1:P:q", 6, "handed")),
        *(("owners", (verb, LEASE_S, ADA, 0)) for verb in ("renew", "forget", "unpark", "reap")),
    ],
)
def test_a_full_server_lets_owners_work_as_any_other(
    scripts: Scripts, redis_server: RedisServer, name: str, args: tuple[object, ...]
) -> None:
    def left_after(memory_max: int) -> list[object]:
        redis_server.ask("FLUSHALL")
        scripts.hold(ADA, _1="a")
        scripts.fill("q", "b")
        scripts.hand(ADA, "q", "handed")
        scripts.ask("SADD", "umbel.queues", "q")
        scripts.delay("q", 4e9, "n.0:1:P:q\0later")
        redis_server.ask("CONFIG", "SET", "maxmemory", memory_max)
        try:
            scripts.run(name, *args)
        finally:
            redis_server.ask("CONFIG", "SET", "maxmemory", 0)
        handed = scripts.waiting(f"umbel.handed.{ADA}")
        return [scripts.waiting("q"), scripts.held(), handed, scripts.delayed("q"), scripts.keys()]

    assert left_after(memory_max=1) == left_after(memory_max=0)


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("publish", ("P:q", 0, "f", "a")),
        ("publish", ("P:q", 4e9, "t:1:P:q", "a")),
        ("bury", ("P:q", "a", "why")),
        ("store", (0, "P:r", "{}")),
        ("chord", ("end", "P:g", 90, "P:q", "a")),
        ("lease", (1001, "publish", "beat", ADA, 1_000_000_000, "keep", "", "P:q", 0, "f", "a")),
    ],
)
def test_a_full_server_takes_nothing_new(
    scripts: Scripts, redis_server: RedisServer, name: str, args: tuple[object, ...]
) -> None:
    lease(scripts, 1000.0, "acquire", ADA, 10)
    before = scripts.keys()
    redis_server.ask("CONFIG", "SET", "maxmemory", 1)
    try:
        with pytest.raises(ReplyError, match="OOM"):
            scripts.run(name, *args)
    finally:
        redis_server.ask("CONFIG", "SET", "maxmemory", 0)
    assert scripts.keys() == before


def test_a_payload_is_kept_byte_by_byte(scripts: Scripts) -> None:
    payload = json.dumps({"status": "SUCCESS", "result": 2**60}).encode() + b"\xff\x00"
    scripts.run("store", 0, "P:r", payload)
    assert scripts.ask("GET", "r") == payload
