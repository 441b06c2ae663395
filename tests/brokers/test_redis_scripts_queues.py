"""What the scripts do with queues and envelopes, one by one: publish, depths, askers, marks."""

import json

import pytest
from hiredis import ReplyError

from tests.brokers.redis_scripts import ADA, BOB, HOUR_S, PREFIX, Scripts, at_step, marked
from tests.servers.redis import RedisServer
from umbel.brokers.interface.connection import DEFAULT_SEP as SEP


@pytest.fixture
def scripts(redis_server: RedisServer, redis_url: str) -> Scripts:
    return Scripts(redis_server)


# -- publishing, and how full the queues are ------------------------------------------------------------


def test_a_batch_goes_to_its_lists_or_waits_until_it_is_due(scripts: Scripts) -> None:
    due = scripts.now + HOUR_S
    scripts.fill("q", "first")
    three = at_step("q", 3)
    batch = (
        *("P:q", 0, "t:1:P:q", "a"),
        *("P:q", scripts.now - 5, "t:2:P:q", "b"),
        *(f"P:{three}", due, f"t:3:P:{three}", "later"),
        *("P:r", 0, "t:4:P:r", ""),
        *("P:q", due, "t:5:P:q", ""),
    )
    assert scripts.run("publish", *batch) == 1
    assert scripts.waiting("q") == [b"first", b"a", b"b"]
    ((member, score),) = scripts.delayed("q")
    assert member == f"t:3:P:{three}\0later".encode() and score == pytest.approx(due, abs=0.001)
    assert scripts.ask("EXISTS", "r") == 0


@pytest.mark.parametrize(("last", "wanted"), [((0, "t:2:P:bad"), "list"), ((4e9, "t:2:P:bad"), "zset")])
def test_a_batch_is_refused_before_any_of_it_is_sent(
    scripts: Scripts, last: tuple[float, str], wanted: str
) -> None:
    scripts.ask("SET", "bad", "not a list")
    scripts.ask("LPUSH", "umbel.delayed.bad", "not a zset")
    due, field = last
    with pytest.raises(ReplyError, match=f"^(ERR )?REFUSED the key 'P:.*bad' holds a .*, not a {wanted}"):
        scripts.run("publish", "P:q", 0, "t:1:P:q", "a", "P:bad", due, field, "b")
    assert scripts.waiting("q") == []


def test_depths_count_what_is_ready_delayed_claimed_and_handed_over(scripts: Scripts) -> None:
    scripts.ask("SADD", "umbel.queues", "q", "r", "s", "bad")
    for step, count in ((0, 1), (3, 2), (6, 3), (9, 4)):
        scripts.fill(at_step("q", step), *(["x"] * count))
    scripts.delay("q", 5.0, "a")
    scripts.delay("q", 6.0, "b")
    three = at_step("q", 3)
    scripts.ask("HSET", f"umbel.inflight.{ADA}", "epoch", "n.1", "n.1:1:P:q", "x", f"n.1:2:P:{three}", "x")
    scripts.ask("HSET", f"umbel.inflight.{BOB}", "epoch", "n.2", "n.2:1:P:r", "x", "kept-n.2:2:P:q", "x")
    scripts.ask("ZADD", "umbel.owners", 0, "idle", 1, ADA, 2, BOB)
    scripts.ask("HSET", f"umbel.inflight.{ADA}", "without a list", "x")
    scripts.hand(ADA, "r", "x", "y")
    scripts.hand(BOB, "q", "z")
    scripts.hand("cy", "s", "z")
    scripts.ask("HSET", "umbel.waits", "q", 7, "r", "many")
    scripts.ask("HSET", "umbel.handing", "idle", f"{PREFIX}q")
    scripts.ask("SET", "bad", "not a list")
    scripts.ask("SET", "umbel.delayed.bad", "not a zset")
    scripts.ask("SET", "umbel.handed.idle", "not a list")
    flat = scripts.run("depths")
    rows = {flat[at]: flat[at + 1 : at + 5] for at in range(0, len(flat), 5)}
    assert rows == {b"q": [10, 2, 4, 7], b"r": [0, 0, 3, 0], b"s": [0, 0, 1, 0], b"bad": [0, 0, 0, 0]}


@pytest.mark.parametrize("key", ["umbel.owners", f"umbel.inflight.{ADA}", "umbel.handing", "umbel.queues"])
def test_depths_are_told_without_what_cannot_be_read(scripts: Scripts, key: str) -> None:
    scripts.ask("SADD", "umbel.queues", "q")
    scripts.fill("q", "x")
    scripts.ask("ZADD", "umbel.owners", 1, ADA)
    scripts.ask("DEL", key)
    scripts.ask("SET", key, "not ours")
    assert scripts.run("depths") == ([] if key == "umbel.queues" else [b"q", 1, 0, 0, 0])


# -- who waits for answers -----------------------------------------------------------------------------


def test_askers_are_bound_while_they_live_and_leave_nothing(scripts: Scripts) -> None:
    exchange = "reply.pidbox"
    members = [f"{name}{SEP}{SEP}{name}.{exchange}" for name in ("one", "two", "three")]
    strange = f"x{SEP}{SEP}celery"
    assert scripts.run("askers", "enter", exchange, 60, *members[:2]) == 2
    binding, askers = f"_kombu.binding.{exchange}", f"umbel.askers.{exchange}"
    assert scripts.ask("SCARD", binding) == 2
    until = float(scripts.ask("ZSCORE", askers, members[0]))
    assert until == pytest.approx(scripts.now + 60, abs=10)
    deadline = float(scripts.ask("ZSCORE", "_kombu.binding_deadlines", exchange))
    assert deadline == pytest.approx((scripts.now + HOUR_S) * 1000, abs=20_000) and deadline % 1000 == 0
    scripts.ask("ZADD", "_kombu.binding_deadlines", 9e15, exchange)
    assert scripts.run("askers", "renew", exchange, -10, members[2], strange, "no queue") == 3
    scripts.run("askers", "enter", exchange, 60)
    assert float(scripts.ask("ZSCORE", "_kombu.binding_deadlines", exchange)) == 9e15
    for name in ("one", "two", "three"):
        for step in (0, 3, 6, 9):
            scripts.fill(at_step(f"{name}.{exchange}", step), "answer")
    scripts.fill("celery", "a message")
    assert scripts.run("askers", "sweep", exchange, 60) == 3
    assert scripts.ask("SCARD", binding) == 2
    assert scripts.run("askers", "leave", exchange, 60, members[0]) == 1
    assert scripts.ask("SMEMBERS", binding) == [members[1].encode()]
    assert scripts.ask("ZRANGE", askers, 0, -1) == [members[1].encode()]
    lists = {f"{PREFIX}{at_step(f'two.{exchange}', step)}" for step in (0, 3, 6, 9)}
    others = {f"{PREFIX}{name}" for name in (binding, askers, "_kombu.binding_deadlines", "celery")}
    assert scripts.keys() == lists | others


def test_renewing_an_asker_does_not_touch_celerys_deadlines(scripts: Scripts) -> None:
    scripts.run("askers", "renew", "e", 60, f"x{SEP}{SEP}x.e")
    assert scripts.ask("EXISTS", "_kombu.binding_deadlines") == 0


# -- marks -----------------------------------------------------------------------------------------------


def returned(scripts: Scripts, envelope: str | bytes) -> str:
    """As it lies in its queue after its owner was given up."""
    scripts.ask("DEL", "q")
    scripts.hold(ADA, _1=envelope)
    assert scripts.owners("forget", ADA) == 1
    (found,) = scripts.waiting("q")
    return found.decode()


def test_a_returned_message_says_redelivered_where_celery_looks_for_it(scripts: Scripts) -> None:
    envelope = {"body": "b", "headers": {}, "properties": {"delivery_info": {"exchange": ""}}}
    told = json.loads(returned(scripts, json.dumps(envelope)))
    assert told.pop("umbel") == {"redelivered": True}
    assert told["headers"] == {"redelivered": True}
    assert told["properties"] == {"delivery_info": {"redelivered": True, "exchange": ""}}
    other = '{"x-headers": {}, "my_delivery_info": {}}'
    assert returned(scripts, other) == '{"umbel": {"redelivered": true}, ' + other[1:]
    compact = '{"headers":{"a":1},"delivery_info": \n{ }}'
    assert json.loads(returned(scripts, compact)) == {
        "umbel": {"redelivered": True},
        "headers": {"redelivered": True, "a": 1},
        "delivery_info": {"redelivered": True},
    }


def test_what_is_told_once_is_not_told_again_and_other_marks_stay(scripts: Scripts) -> None:
    once = returned(scripts, marked("a", starts=2, not_before=7.25))
    assert once == '{"umbel": {"starts": 2, "redelivered": true, "not_before": 7.250000}, "body": "a"}'
    assert returned(scripts, once) == once


@pytest.mark.parametrize(
    "mark",
    [
        '{"starts": -1}',
        '{"starts": 1.5}',
        '{"starts": 1000001}',
        '{"starts": "1"}',
        '{"redelivered": 1}',
        '{"not_before": "soon"}',
        '{"not_before": -0.5}',
        '{"not_before": 1000000000001}',
        "{x}",
    ],
)
def test_what_only_looks_like_a_mark_is_a_part_of_the_envelope(scripts: Scripts, mark: str) -> None:
    envelope = '{"umbel": ' + mark + ', "body": "a"}'
    assert returned(scripts, envelope) == '{"umbel": {"redelivered": true}, ' + envelope[1:]


@pytest.mark.parametrize(
    "mark", ['{"starts": 1000000}', '{"not_before": 1000000000000}', '{"not_before": 0}', '{"starts": 0}']
)
def test_the_outermost_marks_are_marks(scripts: Scripts, mark: str) -> None:
    found = json.loads(returned(scripts, '{"umbel": ' + mark + ', "body": "a"}'))
    assert found["body"] == "a"
    wanted = {name: value for name, value in json.loads(mark).items() if name != "starts" or value}
    assert found["umbel"] == {"redelivered": True} | wanted


@pytest.mark.parametrize("envelope", ["no JSON", '["a"]', '{"umbel": {"starts": 1}}'])
def test_what_is_no_message_comes_back_as_it_was_but_for_a_mark(scripts: Scripts, envelope: str) -> None:
    mark = '{"umbel": {"redelivered": true}, '
    wanted = mark + envelope[1:] if envelope.startswith("{") else envelope
    assert returned(scripts, envelope) == wanted
