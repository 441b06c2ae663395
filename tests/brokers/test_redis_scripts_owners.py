"""The leases of owners, and what becomes of their messages when one has ended, script by script."""

import pytest

from tests.brokers.redis_scripts import ADA, BOB, EPOCH, HOUR_S, LEASE_S, PREFIX, Scripts, at_step, marked
from tests.servers.redis import RedisServer


@pytest.fixture
def scripts(redis_server: RedisServer, redis_url: str) -> Scripts:
    return Scripts(redis_server)


LEASE_END = 2**32


def end_lease(scripts: Scripts, owner: str) -> None:
    scripts.ask("ZADD", "umbel.owners", 1, owner)


def test_a_renewal_says_whether_the_lease_stood_and_counts(scripts: Scripts) -> None:
    assert scripts.owners("renew", ADA) == [0, 1, 0, 0]
    assert scripts.owners("renew", ADA, known=1) == [1, 2, 0, 0]
    assert scripts.lease_of(ADA) == pytest.approx(scripts.now + LEASE_S, abs=10)
    assert scripts.ask("HGET", "umbel.renewals", ADA) == b"2"
    born = float(scripts.ask("HGET", "{coord}:meta", "born"))
    assert born == pytest.approx(scripts.now, abs=10)
    *reply, now = scripts.run("owners", "renew", LEASE_S, ADA, 2)
    assert reply == [1, 3, 0, 0]
    assert float(now) == pytest.approx(scripts.now, abs=10)
    assert float(scripts.ask("HGET", "{coord}:meta", "born")) == born


def test_a_renewal_that_knows_more_than_the_data_finds_it_replaced(scripts: Scripts) -> None:
    assert scripts.owners("check", ADA, known=0) == 0
    assert scripts.owners("check", ADA, known=1) == 1
    assert scripts.owners("renew", ADA, known=1) == [0, 1, 1, 0]
    assert scripts.owners("check", ADA, known=1) == 0
    assert scripts.owners("check", BOB, known=1) == 1
    scripts.ask("HSET", "umbel.renewals", BOB, "none of ours")
    assert scripts.owners("check", BOB, known=1) == 1
    assert scripts.ask("EXISTS", "umbel.contact") == 1  # by the renewal


def test_a_check_renews_nothing(scripts: Scripts) -> None:
    scripts.owners("check", ADA)
    assert scripts.keys() == set()


def test_who_was_given_up_learns_it_from_its_next_renewal(scripts: Scripts) -> None:
    scripts.owners("renew", ADA)
    end_lease(scripts, ADA)
    assert scripts.owners("reap") == 0
    assert float(scripts.ask("ZSCORE", "umbel.lost", ADA)) == pytest.approx(scripts.now, abs=10)
    assert scripts.owners("check", ADA, known=1) == 0
    assert scripts.owners("renew", ADA, known=1) == [0, LEASE_END + 2, 0, 1]
    assert scripts.ask("EXISTS", "umbel.lost") == 0
    # A reply that never came says nothing: who asks again, knowing what it knew, learns it again.
    assert scripts.owners("check", ADA, known=1) == 0
    assert scripts.owners("renew", ADA, known=1) == [1, LEASE_END + 3, 0, 1]
    assert scripts.owners("renew", ADA, known=LEASE_END + 3) == [1, LEASE_END + 4, 0, 0]
    end_lease(scripts, ADA)
    scripts.owners("reap")
    assert scripts.owners("renew", ADA, known=LEASE_END + 4) == [0, 2 * LEASE_END + 5, 0, 1]


def test_a_note_of_a_version_that_forgot_renewals_is_understood(scripts: Scripts) -> None:
    scripts.ask("ZADD", "umbel.lost", scripts.now, ADA)
    assert scripts.owners("check", ADA, known=7) == 0
    assert scripts.owners("renew", ADA, known=7) == [0, 1, 0, 1]
    assert scripts.owners("renew", ADA, known=1) == [1, 2, 0, 0]


def test_the_note_of_one_that_was_given_up_is_kept_for_a_week(scripts: Scripts) -> None:
    day_s = 86400
    for owner, days in (("old", 7.1), ("older", 30), ("recent", 6.9)):
        scripts.ask("ZADD", "umbel.lost", scripts.now - days * day_s, owner)
        scripts.ask("HSET", "umbel.renewals", owner, LEASE_END + 1)
    end_lease(scripts, "today")
    scripts.owners("reap")
    assert scripts.ask("ZRANGE", "umbel.lost", 0, -1) == [b"recent", b"today"]
    assert set(scripts.ask("HKEYS", "umbel.renewals")) == {b"recent", b"today"}


def test_reaping_returns_what_those_held_whose_lease_has_ended(scripts: Scripts) -> None:
    scripts.hold(ADA, _1='{"a": 1}', _2='{"b": 1}')
    scripts.hold(BOB, _1="bob's")
    scripts.ask("ZADD", "umbel.owners", 1, ADA, scripts.now + HOUR_S, BOB)
    scripts.hand(ADA, "q", '{"handed": 1}')
    assert scripts.owners("reap") == 3
    mark = b'{"umbel": {"redelivered": true}, '
    assert scripts.waiting("q") == [mark + b'"a": 1}', mark + b'"b": 1}', mark + b'"handed": 1}']
    assert (scripts.lease_of(ADA), scripts.lease_of(BOB) is None) == (None, False)
    assert (scripts.held(ADA), len(scripts.held(BOB))) == ({}, 2)
    assert scripts.owners("reap") == 0


def test_nobody_is_given_up_while_the_grace_of_an_outage_lasts(scripts: Scripts) -> None:
    scripts.hold(ADA, _1="a")
    end_lease(scripts, ADA)
    scripts.ask("SET", "umbel.grace", "now")
    scripts.delay("r", 1.0, "n.0:1:P:r\0due")
    scripts.ask("SADD", "umbel.queues", "r")
    assert scripts.owners("reap") == 0
    assert (len(scripts.held()), scripts.lease_of(ADA)) == (2, 1.0)
    assert scripts.waiting("r") == [b"due"]  # also where no worker of ours consumes


@pytest.mark.parametrize(("silence_s", "has_grace"), [(13.0, True), (11.0, False)])
def test_after_a_long_silence_of_all_nobody_is_given_up_for_a_lease(
    scripts: Scripts, silence_s: float, has_grace: bool
) -> None:
    now = scripts.now
    scripts.ask("SET", "umbel.contact", now - silence_s)
    scripts.owners("renew", ADA)
    assert float(scripts.ask("GET", "umbel.contact")) == pytest.approx(now, abs=1)
    assert scripts.ask("EXISTS", "umbel.grace") == int(has_grace)
    if has_grace:
        assert 28_000 < scripts.ask("PTTL", "umbel.grace") <= 30_000
        assert float(scripts.ask("GET", "umbel.grace")) == pytest.approx(now + LEASE_S, abs=1)


def test_renewals_without_a_script_are_no_silence(scripts: Scripts) -> None:
    """They leave a trace among the leases alone."""
    scripts.ask("SET", "umbel.contact", scripts.now - LEASE_S)
    scripts.ask("ZADD", "umbel.owners", scripts.now + LEASE_S - 11, BOB)
    scripts.owners("renew", ADA)
    assert scripts.ask("EXISTS", "umbel.grace") == 0
    scripts.ask("SET", "umbel.contact", scripts.now - LEASE_S)
    scripts.ask("ZADD", "umbel.owners", scripts.now + LEASE_S - 13, ADA, scripts.now + LEASE_S - 13, BOB)
    scripts.owners("renew", ADA)
    assert scripts.ask("EXISTS", "umbel.grace") == 1


@pytest.mark.parametrize("unreadable", [("SET", "soon"), ("LPUSH", "soon")])
def test_a_contact_that_cannot_be_read_is_no_silence(scripts: Scripts, unreadable: tuple[str, str]) -> None:
    command, value = unreadable
    scripts.ask(command, "umbel.contact", value)
    scripts.owners("renew", ADA)
    assert scripts.ask("EXISTS", "umbel.grace") == 0
    assert float(scripts.ask("GET", "umbel.contact")) == pytest.approx(scripts.now, abs=10)


def test_forgetting_an_owner_returns_what_it_holds_at_once(scripts: Scripts) -> None:
    scripts.claim()
    scripts.hold(ADA, _1='{"a": 1}')
    scripts.owners("renew", ADA)
    scripts.ask("HSET", "umbel.generations", ADA, 1)
    scripts.hand(ADA, "q", '{"handed": 1}')
    assert scripts.owners("forget", ADA) == 2
    # What was only handed over has not run.
    assert scripts.waiting("q") == [b'{"umbel": {"redelivered": true}, "a": 1}', b'{"handed": 1}']
    assert scripts.held() == {}
    for key in ("umbel.generations", "umbel.renewals"):
        assert scripts.ask("HEXISTS", key, ADA) == 0
    assert (scripts.lease_of(ADA), scripts.ask("EXISTS", "umbel.lost")) == (None, 0)


def test_what_nobody_takes_stays_with_its_owner_until_it_is_tried_again(scripts: Scripts) -> None:
    scripts.hold(ADA, _1="a", _2="b")
    scripts.hand(ADA, "q", "handed")
    scripts.ask("SET", "q", "not a list")
    scripts.ask("SET", "umbel.dead", "not a stream")
    assert scripts.owners("forget", ADA) == 0
    assert scripts.lease_of(ADA) == pytest.approx(scripts.now + LEASE_S, abs=10)
    assert scripts.held() == {b"n.1:1:P:q": b"a", b"n.1:2:P:q": b"b"}
    scripts.ask("DEL", "q")
    assert scripts.owners("forget", ADA) == 3
    assert scripts.lease_of(ADA) is None


def test_what_was_handed_over_and_nobody_takes_stays_with_its_owner(scripts: Scripts) -> None:
    scripts.hand(ADA, "q", "a")
    scripts.ask("SET", "q", "not a list")
    scripts.ask("SET", "umbel.dead", "not a stream")
    assert scripts.owners("forget", ADA) == 0
    assert scripts.lease_of(ADA) == pytest.approx(scripts.now + LEASE_S, abs=10)
    assert scripts.waiting(f"umbel.handed.{ADA}") == [b"a"]


def test_what_was_handed_to_one_that_does_not_claim_it_goes_back_unmarked(scripts: Scripts) -> None:
    scripts.hand(ADA, "q", '{"a": 1}', '{"b": 1}')
    scripts.hand(BOB, "q", "bob's")
    assert scripts.owners("unhand", ADA) == 2
    assert scripts.waiting("q") == [b'{"a": 1}', b'{"b": 1}']
    assert scripts.waiting(f"umbel.handed.{BOB}") == [b"bob's"]
    assert scripts.owners("unhand", "nobody") == 0


def test_what_was_handed_over_goes_back_in_its_order_before_what_waits(scripts: Scripts) -> None:
    scripts.ask("LPUSH", "q", "waits")
    scripts.hand(ADA, "q", "first", "second", "third")
    assert scripts.owners("unhand", ADA) == 3
    assert scripts.waiting("q") == [b"first", b"second", b"third", b"waits"]


def test_a_list_of_handed_messages_without_a_queue_is_left_alone(scripts: Scripts) -> None:
    scripts.ask("LPUSH", f"umbel.handed.{ADA}", "a")
    assert scripts.owners("unhand", ADA) == 0
    scripts.ask("SET", "umbel.handing", "not a hash")
    assert scripts.owners("unhand", ADA) == 0
    assert scripts.waiting(f"umbel.handed.{ADA}") == [b"a"]


def test_what_is_handed_to_one_that_was_given_up_goes_back_for_a_minute(scripts: Scripts) -> None:
    scripts.hand(ADA, "q", "a")
    scripts.hand(BOB, "q", "b")
    scripts.ask("ZADD", "umbel.owners", scripts.now + HOUR_S, BOB)
    assert scripts.owners("reap") == 1
    assert scripts.ask("HKEYS", "umbel.handing") == [ADA.encode(), BOB.encode()]
    since = float(scripts.ask("ZSCORE", "umbel.handing.given_up", ADA))
    assert since == pytest.approx(scripts.now, abs=10)
    scripts.hand(ADA, "q", "c")
    assert scripts.owners("reap") == 1
    assert float(scripts.ask("ZSCORE", "umbel.handing.given_up", ADA)) == since
    scripts.ask("ZADD", "umbel.handing.given_up", scripts.now - 61, ADA, scripts.now - 61, BOB)
    scripts.ask("ZADD", "umbel.handing.given_up", scripts.now - 50, "recent")
    scripts.ask("HSET", "umbel.handing", "recent", f"{PREFIX}q")
    scripts.owners("reap")
    assert scripts.ask("HKEYS", "umbel.handing") == [BOB.encode(), b"recent"]
    assert scripts.ask("ZRANGE", "umbel.handing.given_up", 0, -1) == [b"recent"]


def test_when_the_last_owner_leaves_what_is_parked_goes_back_with_its_time(scripts: Scripts) -> None:
    due = scripts.now + HOUR_S
    three = at_step("q", 3)
    scripts.ask("SADD", "umbel.queues", "q", "r", "s")
    scripts.delay("s", 0.0, 'n.0:5:P:s\0{"e": 1}')
    scripts.delay("s", 1e12, 'n.0:6:P:s\0{"f": 1}')
    scripts.delay("q", due, 'n.0:1:P:q\0{"a": 1}')
    scripts.delay("q", due + 1, f"n.0:2:P:{three}\0".encode() + marked("b", starts=2, not_before=5.5))
    scripts.delay("r", -1.0, 'n.0:3:P:r\0{"c": 1}')
    scripts.delay("r", 2e12, 'n.0:4:P:r\0{"d": 1}')
    assert scripts.owners("unpark", ADA) == 6
    assert scripts.waiting("q") == [b'{"umbel": {"not_before": %.6f}, "a": 1}' % due]
    assert scripts.waiting(three) == [
        b'{"umbel": {"starts": 2, "not_before": %.6f}, "body": "b"}' % (due + 1)
    ]
    assert scripts.waiting("r") == [b'{"c": 1}', b'{"d": 1}']
    assert scripts.waiting("s") == [
        b'{"umbel": {"not_before": 0.000000}, "e": 1}',
        b'{"umbel": {"not_before": 1000000000000.000000}, "f": 1}',
    ]
    assert (scripts.delayed("q"), scripts.delayed("r")) == ([], [])
    assert scripts.owners("unpark", ADA) == 0


def test_nothing_is_unparked_while_an_owner_is_left(scripts: Scripts) -> None:
    scripts.ask("SADD", "umbel.queues", "q")
    scripts.delay("q", scripts.now + HOUR_S, "n.0:1:P:q\0a")
    scripts.ask("ZADD", "umbel.owners", scripts.now + 10, BOB)
    assert scripts.owners("unpark", ADA) == 0
    end_lease(scripts, BOB)
    assert scripts.owners("unpark", ADA) == 1


def test_unparking_goes_in_parts_and_behind_what_waits(scripts: Scripts) -> None:
    scripts.ask("SADD", "umbel.queues", "q", "r", "s")
    scripts.fill("q", "first")
    for queue in ("q", "r", "s"):
        members = (part for place in range(700) for part in (place + 1, f"n.0:{place}:P:{queue}\0{place}"))
        scripts.ask("ZADD", f"umbel.delayed.{queue}", *members)
    assert scripts.owners("unpark", ADA) == 1000
    assert sum(len(scripts.delayed(queue)) for queue in ("q", "r", "s")) == 1100
    assert [scripts.owners("unpark", ADA) for _ in range(3)] == [1000, 100, 0]
    assert scripts.waiting("q")[:3] == [b"first", b"0", b"1"]


def test_unparking_stops_where_nobody_takes_a_message(scripts: Scripts) -> None:
    scripts.ask("SADD", "umbel.queues", "q")
    scripts.ask("SET", "bad", "not a list")
    scripts.ask("SET", "umbel.dead", "not a stream")
    scripts.delay("q", 5.0, "n.0:1:P:q\0a")
    scripts.delay("q", 6.0, "n.0:2:P:bad\0b")
    scripts.delay("q", 7.0, "n.0:3:P:q\0c")
    assert scripts.owners("unpark", ADA) == 1
    assert scripts.waiting("q") == [b"a"]
    assert len(scripts.delayed("q")) == 2
    scripts.ask("SADD", "umbel.queues", "r")
    for queue in ("q", "r"):
        scripts.delay(queue, 4.0, f"n.0:4:P:{queue}\0d")
        scripts.delay(queue, 6.0, "n.0:5:P:bad\0e")
    assert scripts.owners("unpark", ADA) == 2  # one of each


def test_many_owners_are_given_up_in_parts(scripts: Scripts) -> None:
    scripts.ask("ZADD", "umbel.owners", *(part for number in range(101) for part in (1, f"owner {number}")))
    scripts.owners("reap")
    assert scripts.ask("ZCARD", "umbel.owners") == 1
    scripts.owners("reap")
    assert scripts.ask("ZCARD", "umbel.owners") == 0


def test_a_held_message_that_names_no_queue_is_a_dead_letter(scripts: Scripts) -> None:
    scripts.ask("HSET", f"umbel.inflight.{ADA}", "no field of ours", "a")
    assert scripts.owners("forget", ADA) == 1
    (letter,) = scripts.letters()
    assert (letter["list"], letter["envelope"]) == ("", "a")
    assert letter["reason"] == "nothing says which queue this came from"


def test_what_names_no_queue_does_not_keep_the_others_from_going_back(scripts: Scripts) -> None:
    scripts.hold(ADA, _1="a", _2="b")
    scripts.ask("HSET", f"umbel.inflight.{ADA}", "no field of ours", "c", "nor this", "d")
    assert scripts.owners("forget", ADA) == 4
    assert scripts.waiting("q") == [b"a", b"b"]
    assert {letter["envelope"] for letter in scripts.letters()} == {"c", "d"}


def test_an_epoch_is_gone_with_its_owner(scripts: Scripts) -> None:
    scripts.claim()
    end_lease(scripts, ADA)
    scripts.owners("reap")
    assert scripts.ask("EXISTS", f"umbel.inflight.{ADA}") == 0
    assert scripts.claim(ticket="n.2").epoch == b"n.2" != EPOCH.encode()
