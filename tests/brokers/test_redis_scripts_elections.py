"""The script of elections: each rule of a claim, the fence of its holder, what is kept and listed."""

from collections.abc import Mapping

import pytest
from hiredis import ReplyError

from tests.brokers.redis_scripts import ADA, BOB, PREFIX, Scripts
from tests.servers.redis import RedisServer

ONCE, SURE = "at_most_once", "at_least_once"
BORN = 1000.0  # when the store first hears of an election
TTL_S = 10
ASKED = ("{}", SURE, BORN, 300)
FIELDS = (
    *("state", "request", "policy", "holder", "started", "outcome"),
    *("asked_at", "expires_s", "changed_at", "term", "attempt", "expires_at", "ttl_s"),
)


class Elections:
    """The script, asked by the holder's name, with every instant said. Terms are instants in microseconds."""

    def __init__(self, scripts: Scripts) -> None:
        self.data = scripts

    def run(self, now: float, verb: str, *args: object, key: str = "k") -> object:
        return self.data.run("election", now, verb, key, *args)

    def open(self, now: float = BORN, *, policy: str = SURE, key: str = "k") -> Mapping[str, str]:
        return _as_map(self.run(now, "open", "{}", policy, BORN, 300, key=key))

    def claim(
        self, now: float, holder: str = ADA, *, policy: str = SURE, asked_at: float = BORN
    ) -> list[object]:
        found = self.run(now, "claim", "{}", policy, asked_at, 300, holder, TTL_S)
        assert isinstance(found, list)
        return [part.decode() if isinstance(part, bytes) else part for part in found]

    def read(self, key: str = "k") -> Mapping[str, str]:
        return _as_map(self.run(BORN, "read", key=key))

    def unfinished(self, now: float, limit: int = 10) -> list[bytes]:
        flat = self.run(now, "unfinished", limit, key="")
        assert isinstance(flat, list)
        return flat[::2]


def _as_map(flat: object) -> Mapping[str, str]:
    assert isinstance(flat, list)
    return {key.decode(): value.decode() for key, value in zip(flat[::2], flat[1::2], strict=True)}


def granted(now: float, attempt: int) -> list[object]:
    return ["granted", f"{now * 1e6:.0f}", str(attempt)]


@pytest.fixture
def elections(redis_server: RedisServer, redis_url: str) -> Elections:
    return Elections(Scripts(redis_server))


# -- claims ------------------------------------------------------------------------------------------


def test_an_election_that_is_opened_waits_as_it_was_asked_for(elections: Elections) -> None:
    asked = {
        "state": "open",
        "request": "{}",
        "policy": SURE,
        "asked_at": "1000.000000",
        "expires_s": "300",
        "changed_at": "1000.000000",
        "holder": "",
        "term": "0",
        "attempt": "0",
        "started": "0",
        "expires_at": "0",
        "ttl_s": "0",
        "outcome": "",
    }
    assert elections.open() == asked == elections.read()
    assert elections.open(1005.0, policy=ONCE) == asked  # the first stays
    assert elections.data.ask("HGET", "{coord}:meta", "born") == b"1000.000000"
    assert elections.run(BORN, "read", key="other") == []


def test_a_claim_is_kept_with_its_holder_its_term_and_its_time(elections: Elections) -> None:
    elections.open()
    assert elections.claim(1001.0) == granted(1001.0, 1)
    assert elections.read() == {
        "state": "held",
        "request": "{}",
        "policy": SURE,
        "asked_at": "1000.000000",
        "expires_s": "300",
        "changed_at": "1001.000000",
        "holder": ADA,
        "term": "1001000000",
        "attempt": "1",
        "started": "0",
        "expires_at": "1011.000000",
        "ttl_s": "10",
        "outcome": "",
    }
    assert elections.claim(1004.0) == granted(1001.0, 1)  # its reply may have been lost
    assert elections.read()["expires_at"] == "1011.000000"
    assert elections.claim(1004.0, BOB) == ["busy", ADA, "1001000000", "7.000000"]
    assert elections.claim(1010.999999, BOB) == ["busy", ADA, "1001000000", "0.000001"]
    assert elections.claim(1011.0, BOB) == granted(1011.0, 2)
    assert elections.read()["holder"] == BOB


def test_an_election_that_nobody_opened_is_made_by_its_first_claim(elections: Elections) -> None:
    assert elections.claim(BORN) == granted(BORN, 1)
    assert elections.data.ask("HGET", "{coord}:meta", "born") == b"1000.000000"
    found = elections.read()
    assert (found["request"], found["policy"], found["expires_s"]) == ("{}", SURE, "300")
    assert float(found["asked_at"]) == BORN


def test_after_five_attempts_an_election_has_failed(elections: Elections) -> None:
    elections.open()
    for attempt in range(1, 6):
        assert elections.claim(BORN + attempt * TTL_S) == granted(BORN + attempt * TTL_S, attempt)
    last = f"{(BORN + 5 * TTL_S) * 1e6:.0f}"
    assert elections.claim(1060.0, BOB) == ["closed", "failed", ADA, last, "attempts", 1]
    assert elections.claim(1061.0, BOB) == ["closed", "failed", ADA, last, "attempts", 0]
    assert elections.read()["changed_at"] == "1060.000000"
    assert elections.unfinished(9999.0) == []
    assert elections.run(1062.0, "finish", ADA, last, "ok") == 0  # it never started


@pytest.mark.parametrize("policy", [ONCE, SURE])
def test_an_election_that_nobody_started_in_time_has_expired(elections: Elections, policy: str) -> None:
    elections.open(policy=policy)
    assert elections.claim(1300.0) == granted(1300.0, 1)  # the last moment
    expired = ["closed", "expired", ADA, "1300000000", "deadline"]
    assert elections.claim(1310.0, BOB) == [*expired, 1]
    assert elections.claim(1310.0) == [*expired, 0]
    assert elections.run(1311.0, "finish", ADA, "1300000000", "ok") == 0
    assert elections.run(1311.0, "renew", ADA, "1300000000") == 0
    assert elections.read()["state"] == "expired"


def test_what_had_started_is_tried_again_however_late(elections: Elections) -> None:
    elections.open()
    elections.claim(1295.0)
    assert elections.run(1296.0, "start", ADA, "1295000000") == 1
    assert elections.claim(1306.0, BOB) == granted(1306.0, 2)
    assert elections.read()["started"] == "0"  # by this holder
    assert elections.claim(1316.0) == ["closed", "expired", BOB, "1306000000", "deadline", 1]


def test_what_may_run_once_is_tried_again_only_if_it_never_started(elections: Elections) -> None:
    elections.claim(BORN, policy=ONCE)
    assert elections.claim(1010.0, BOB, policy=ONCE) == granted(1010.0, 2)
    assert elections.run(1011.0, "start", BOB, "1010000000") == 1
    assert elections.claim(1020.999999) == ["busy", BOB, "1010000000", "0.000001"]
    lost = ["closed", "failed", BOB, "1010000000", "winner lost after start"]
    assert elections.claim(1021.0) == [*lost, 1]
    assert elections.claim(1022.0, BOB) == [*lost, 0]


# -- a store that was emptied --------------------------------------------------------------------------


def test_what_may_run_once_is_not_claimed_from_a_store_that_may_have_forgotten_it(
    elections: Elections,
) -> None:
    elections.open(key="other")
    asked_before = {"policy": ONCE, "asked_at": BORN - 0.5}
    reset = ["closed", "expired", "", "0", "store reset"]
    assert elections.claim(2000.0, **asked_before) == [*reset, 1]  # type: ignore[arg-type]
    assert elections.claim(2001.0, **asked_before) == [*reset, 0]  # type: ignore[arg-type]
    found = elections.read()
    assert (found["state"], found["changed_at"]) == ("expired", "2000.000000")


def test_what_must_run_waits_for_a_holder_that_the_store_may_have_forgotten(elections: Elections) -> None:
    elections.open(key="other")
    early = BORN - 0.5
    assert elections.claim(1004.0, asked_at=early) == ["busy", "", "0", "6.000000"]
    assert elections.run(BORN, "read") == []
    assert elections.claim(1010.0, asked_at=early) == granted(1010.0, 1)


def test_what_is_asked_when_the_store_was_there_is_granted_at_once(elections: Elections) -> None:
    elections.open(key="other")
    assert elections.claim(1001.0, policy=ONCE, asked_at=BORN) == granted(1001.0, 1)


# -- the fence ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("verb", "started"), [("renew", "0"), ("start", "1")])
def test_a_holder_goes_on_while_its_time_lasts(elections: Elections, verb: str, started: str) -> None:
    elections.claim(BORN)
    for holder, term in ((BOB, "1000000000"), (ADA, "1000000001"), (ADA, "0")):
        assert elections.run(1001.0, verb, holder, term) == 0
    before = elections.read()
    assert elections.run(1004.0, verb, ADA, "1000000000") == 1
    changed = {"expires_at": "1014.000000", "changed_at": "1004.000000", "started": started}
    assert elections.read() == {**before, **changed}
    assert elections.run(1014.0, verb, ADA, "1000000000") == 0  # its time is over
    assert elections.run(1013.999999, verb, ADA, "1000000000") == 1
    assert elections.unfinished(1023.999998) == []
    assert elections.unfinished(1024.0) == [b"k"]


@pytest.mark.parametrize("verb", ["renew", "start", "finish"])
def test_nobody_goes_on_with_an_election_that_is_none(elections: Elections, verb: str) -> None:
    assert elections.run(BORN, verb, ADA, "0", "ok") == 0
    assert elections.data.keys() == set()
    elections.open()
    assert elections.run(BORN, verb, "", "0", "ok") == 0  # nobody holds it
    assert elections.read()["state"] == "open"


def test_what_was_done_is_done_however_late_it_is_told(elections: Elections) -> None:
    elections.claim(BORN)
    for holder, term in ((BOB, "1000000000"), (ADA, "1")):
        assert elections.run(1001.0, "finish", holder, term, "wrong") == 0
    elections.run(1002.0, "start", ADA, "1000000000")
    assert elections.run(1500.0, "finish", ADA, "1000000000", "ok") == 1
    found = elections.read()
    told = (found["state"], found["outcome"], found["changed_at"], found["started"])
    assert told == ("done", "ok", "1500.000000", "1")
    assert elections.claim(1501.0, BOB) == ["closed", "done", ADA, "1000000000", "ok", 0]
    assert elections.run(1501.0, "finish", ADA, "1000000000", "again") == 1  # its reply may have been lost
    for verb in ("renew", "start"):
        assert elections.run(1001.0, verb, ADA, "1000000000") == 0
    assert elections.read()["state"] == "done"


def test_a_winner_that_was_given_up_after_its_start_may_still_say_that_it_is_done(
    elections: Elections,
) -> None:
    elections.claim(BORN, policy=ONCE)
    elections.run(1001.0, "start", ADA, "1000000000")
    elections.claim(1020.0, BOB)
    assert elections.read()["state"] == "failed"
    assert elections.run(1021.0, "finish", ADA, "1000000000", "ok") == 1
    assert (elections.read()["state"], elections.read()["outcome"]) == ("done", "ok")


# -- what is kept and listed ---------------------------------------------------------------------------


def test_an_election_is_listed_from_when_somebody_should_look_until_it_is_closed(
    elections: Elections,
) -> None:
    for key in ("k", "l", "m"):
        elections.open(key=key)
    assert (elections.unfinished(999.0), elections.unfinished(BORN)) == ([], [b"k", b"l", b"m"])
    assert elections.unfinished(BORN, limit=2) == [b"k", b"l"]
    assert elections.claim(1001.0) == granted(1001.0, 1)
    assert elections.unfinished(1010.0) == [b"l", b"m"]
    assert set(elections.unfinished(1011.0)) == {b"k", b"l", b"m"}
    assert elections.run(1002.0, "finish", ADA, "1001000000", "ok") == 1
    assert 86_000 < elections.data.ask("TTL", "{coord}:e:k") <= 86_400
    elections.data.ask("DEL", "{coord}:e:l")
    elections.data.ask("HDEL", "{coord}:e:m", "attempt")
    assert elections.unfinished(2000.0) == []
    assert elections.data.ask("ZCARD", "{coord}:open") == 0


def test_the_list_shows_each_election_whole(elections: Elections) -> None:
    elections.open()
    elections.data.ask("ZADD", "{coord}:open", 1, "other")
    elections.data.ask("SET", "{coord}:e:other", "not ours")
    listed = elections.run(BORN, "unfinished", 10, key="")
    assert isinstance(listed, list) and len(listed) == 2
    assert (listed[0], _as_map(listed[1])) == (b"k", elections.read())
    assert elections.data.ask("ZRANGE", "{coord}:open", 0, -1) == [b"k"]


@pytest.mark.parametrize("field", FIELDS)
def test_an_election_that_lacks_something_is_none(elections: Elections, field: str) -> None:
    elections.open()
    elections.data.ask("HDEL", "{coord}:e:k", field)
    assert elections.run(BORN, "read") == []
    assert elections.open(1001.0)["asked_at"] == "1001.000000"
    assert set(elections.read()) == set(FIELDS)


@pytest.mark.parametrize("field", FIELDS[6:])
def test_an_election_with_words_for_a_number_is_none(elections: Elections, field: str) -> None:
    elections.open()
    elections.data.ask("HSET", "{coord}:e:k", field, "several")
    assert elections.run(BORN, "read") == []


@pytest.mark.parametrize(
    ("key", "wanted"), [("{coord}:e:k", "hash"), ("{coord}:open", "zset"), ("{coord}:meta", "hash")]
)
@pytest.mark.parametrize("verb", ["open", "claim"])
def test_a_key_of_an_election_of_another_type_is_named(
    elections: Elections, key: str, wanted: str, verb: str
) -> None:
    elections.data.ask("SET", key, "not ours")
    refused = f"^(ERR )?REFUSED the key 'P:{key}' holds a string, not a {wanted}: "
    with pytest.raises(ReplyError, match=refused):
        elections.run(BORN, verb, *ASKED, ADA, TTL_S)
    assert elections.data.keys() == {f"{PREFIX}{key}"}


def test_a_list_of_elections_of_another_type_is_named(elections: Elections) -> None:
    elections.data.ask("SET", "{coord}:open", "not ours")
    with pytest.raises(ReplyError, match=r"REFUSED the key 'P:\{coord\}:open' holds a string, not a zset"):
        elections.unfinished(BORN)
