"""What the scripts do with paused queues and with messages that are moved, one by one."""

import pytest
from hiredis import ReplyError

from tests.brokers.redis_scripts import Scripts, at_step
from tests.servers.redis import RedisServer

STEPS = (0, 3, 6, 9)
SIGNED = '{"headers": {"umbel_signature": "1:k:1:0"}}'


@pytest.fixture
def scripts(redis_server: RedisServer, redis_url: str) -> Scripts:
    return Scripts(redis_server)


def move(scripts: Scripts, limit: int, source: str = "q", target: str = "r") -> object:
    return scripts.run("move", source, target, limit)


def test_a_claim_passes_over_paused_queues(scripts: Scripts) -> None:
    scripts.fill("q", "a", "b")
    scripts.fill("r", "c")
    scripts.delay("q", scripts.now - 1, "t:1:P:q\0due")
    scripts.ask("HSET", "umbel.paused", "q", "{}")
    assert scripts.claim("q", "r").envelopes == [b"c"]
    assert scripts.waiting("q") == [b"due", b"a", b"b"]  # what is due is ready all the same
    scripts.ask("HDEL", "umbel.paused", "q")
    scripts.ask("HSET", "umbel.paused", "another", "{}")
    assert scripts.claim("q", "r", ticket="n.2").envelopes == [b"due", b"a", b"b"]


def test_a_mark_that_cannot_be_read_pauses_nothing(scripts: Scripts) -> None:
    scripts.fill("q", "a")
    scripts.ask("SET", "umbel.paused", "not ours")
    assert scripts.claim("q").envelopes == [b"a"]


def test_messages_are_moved_in_their_order_by_priority_and_then_those_not_due(scripts: Scripts) -> None:
    for step in STEPS:
        scripts.fill(at_step("q", step), f"{step}a", f"{step}b")
        scripts.fill(at_step("r", step), f"{step}r")
    three = at_step("q", 3)
    scripts.delay("q", 5e9, f"t:1:P:{three}\0late")
    scripts.delay("q", 4e9, ":2:P:q\0soon")
    assert move(scripts, 3) == [3, 0]
    assert scripts.waiting("r") == [b"0r", b"0a", b"0b"]
    assert scripts.waiting(at_step("r", 3)) == [b"3r", b"3a"]
    assert scripts.delayed("r") == []
    assert move(scripts, 6) == [6, 0]
    assert scripts.delayed("r") == [(b":2:P:r\0soon", 4e9)]
    assert move(scripts, 100) == [1, 0]
    target = at_step("r", 3).encode()
    assert scripts.delayed("r") == [(b":2:P:r\0soon", 4e9), (b"t:1:P:" + target + b"\0late", 5e9)]
    for step in STEPS:
        assert scripts.waiting(at_step("q", step)) == []
        assert scripts.waiting(at_step("r", step)) == [f"{step}{one}".encode() for one in "rab"]
    assert scripts.delayed("q") == [] and move(scripts, 5) == [0, 0]


def test_what_waits_under_a_name_that_is_not_ours_keeps_it(scripts: Scripts) -> None:
    for due, member in enumerate(("no list\0a", "t:1:P:other\0b", "c", "t:2:P:qq\0d"), 1):
        scripts.delay("q", due, member)
    assert move(scripts, 9) == [4, 0]
    assert [member for member, _ in scripts.delayed("r")] == [
        *(b"no list\0a", b"t:1:P:other\0b", b"c", b"t:2:P:qq\0d"),
    ]


def test_of_two_that_would_be_one_the_second_stays(scripts: Scripts) -> None:
    scripts.delay("q", 5, "same")
    scripts.delay("r", 7, "same")
    assert move(scripts, 9) == [0, 0]
    assert scripts.delayed("q") == [(b"same", 5)] and scripts.delayed("r") == [(b"same", 7)]


def test_a_signed_message_ends_the_move(scripts: Scripts) -> None:
    scripts.fill("q", "a", SIGNED, "b")
    assert move(scripts, 9) == [1, 1]
    assert scripts.waiting("r") == [b"a"] and scripts.waiting("q") == [SIGNED.encode(), b"b"]
    scripts.delay("s", 5, "t:1:P:s\0a")
    scripts.delay("s", 6, f"t:2:P:s\0{SIGNED}")
    assert move(scripts, 9, "s", "r") == [1, 1]
    assert scripts.delayed("r") == [(b"t:1:P:r\0a", 5)]
    assert scripts.delayed("s") == [(f"t:2:P:s\0{SIGNED}".encode(), 6)]


@pytest.mark.parametrize("queue", ["q", "r"])
@pytest.mark.parametrize("step", STEPS)
def test_nothing_is_moved_where_a_list_is_not_one(scripts: Scripts, queue: str, step: int) -> None:
    scripts.fill("q" if queue == "r" or step else at_step("q", 3), "a")
    scripts.ask("SET", at_step(queue, step), "not a list")
    with pytest.raises(ReplyError, match=r"REFUSED the key .* holds a string, not a list"):
        move(scripts, 9)


@pytest.mark.parametrize("queue", ["q", "r"])
def test_nothing_is_moved_where_a_set_of_delayed_ones_is_not_one(scripts: Scripts, queue: str) -> None:
    scripts.fill("q", "a")
    scripts.ask("SET", f"umbel.delayed.{queue}", "not a set")
    with pytest.raises(ReplyError, match=r"REFUSED the key .* holds a string, not a zset"):
        move(scripts, 9)
    assert scripts.waiting("q") == [b"a"]


def test_nothing_is_moved_where_there_is_no_room(scripts: Scripts, redis_server: RedisServer) -> None:
    scripts.fill("q", "a")
    redis_server.ask("CONFIG", "SET", "maxmemory", "1")
    try:
        with pytest.raises(ReplyError, match="OOM"):
            move(scripts, 9)
        assert scripts.waiting("q") == [b"a"]
    finally:
        redis_server.ask("CONFIG", "SET", "maxmemory", "0")
