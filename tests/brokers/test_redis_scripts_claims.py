"""What the scripts of an owner do, one by one: claim, adopt, abandon, reconcile, and the leases of owners."""

import pytest
from hiredis import ReplyError

from tests.brokers.redis_scripts import (
    ADA,
    BOB,
    EPOCH,
    HOUR_S,
    LEASE_S,
    PREFIX,
    Scripts,
    at_step,
    marked,
)
from tests.servers.redis import RedisServer

QUEUE_KEY = f"{PREFIX}q".encode()


@pytest.fixture
def scripts(redis_server: RedisServer, redis_url: str) -> Scripts:
    return Scripts(redis_server)


# -- claim -------------------------------------------------------------------------------------------


def test_a_claim_takes_oldest_first_and_shares_between_queues(scripts: Scripts) -> None:
    scripts.fill("q", *(f"a{number}" for number in range(5)))
    scripts.fill("r", "b0")
    reply = scripts.claim("q", "r", limit=4)
    other = f"{PREFIX}r".encode()
    taken = [(QUEUE_KEY, 1, [b"a0", b"a1"]), (other, 3, [b"b0"]), (QUEUE_KEY, 4, [b"a2"])]
    assert reply.taken == [part for key, first, names in taken for part in (key, first, b"", names)]
    assert (reply.epoch, reply.complete, reply.broken) == (EPOCH.encode(), 1, [])
    assert float(reply.now) == pytest.approx(scripts.now, abs=10)
    held = {f"{EPOCH}:1:P:q": "a0", f"{EPOCH}:2:P:q": "a1", f"{EPOCH}:3:P:r": "b0", f"{EPOCH}:4:P:q": "a2"}
    assert scripts.held() == {b"epoch": EPOCH.encode()} | {k.encode(): v.encode() for k, v in held.items()}
    assert scripts.waiting("q") == [b"a3", b"a4"]
    assert scripts.lease_of(ADA) == pytest.approx(float(reply.now) + LEASE_S, abs=0.01)
    assert scripts.ask("GET", "umbel.contact") == reply.now


def test_a_claim_takes_by_priority_and_no_more_than_its_limit(scripts: Scripts) -> None:
    for step in (9, 6, 3, 0):
        scripts.fill(at_step("q", step), f"p{step}")
        scripts.fill(at_step("r", step), f"r{step}")
    assert scripts.claim("q", "r", limit=3).envelopes == [b"p0", b"r0", b"p3"]
    assert scripts.claim("q", "r", limit=0, ticket="n.2").envelopes == []
    assert scripts.claim("q", "r", ticket="n.3").envelopes == [b"r3", b"p6", b"r6", b"p9", b"r9"]


def test_a_queue_without_messages_takes_no_share(scripts: Scripts) -> None:
    scripts.fill("q", "a", "b")
    scripts.ask("SET", "bad", "not a list")
    assert scripts.claim("empty", "bad", "q", limit=2).envelopes == [b"a", b"b"]


def test_the_epoch_is_the_ticket_of_the_first_claim(scripts: Scripts) -> None:
    assert scripts.claim().epoch == EPOCH.encode()
    assert scripts.claim(ticket="n.2").epoch == EPOCH.encode()
    assert scripts.claim(ticket="n.3", owner=BOB).epoch == b"n.3"


@pytest.mark.parametrize(("least", "takes"), [("6", False), ("5", True), ("4", True), ("none of ours", True)])
def test_a_claim_on_a_connection_that_was_given_up_takes_nothing(
    scripts: Scripts, least: str, takes: bool
) -> None:
    scripts.fill("q", "a")
    scripts.ask("HSET", "umbel.generations", ADA, least)
    reply = scripts.claim(generation=5, after=7)
    assert reply.envelopes == ([b"a"] if takes else [])
    assert (reply.epoch is None, reply.cursor, reply.complete) == (not takes, b"7", 1)
    assert (scripts.lease_of(ADA) is None) == (not takes)
    assert float(reply.now) == pytest.approx(scripts.now, abs=10)
    assert (reply.revokes, reply.broken) == ([], [])


def test_what_is_not_due_is_moved_aside_and_does_not_count(scripts: Scripts) -> None:
    now = scripts.now
    later, past = marked("later", not_before=now + HOUR_S), marked("past", not_before=now - 1)
    scripts.fill("q", later, "a", past, later, "b")
    assert scripts.claim(limit=3).envelopes == [b"a", past, b"b"]
    delayed = scripts.delayed("q")
    assert [member for member, _ in delayed] == [
        f"{EPOCH}:p{number}:P:q\0".encode() + later for number in range(2)
    ]
    assert [due for _, due in delayed] == pytest.approx([now + HOUR_S] * 2, abs=0.001)
    assert len(scripts.held()) == 4


def test_one_claim_moves_no_more_than_so_many_aside(scripts: Scripts) -> None:
    later = marked("later", not_before=scripts.now + HOUR_S)
    scripts.fill("q", *([later] * 2500), "a")
    assert scripts.claim(limit=1).taken == []
    assert (len(scripts.delayed("q")), len(scripts.waiting("q"))) == (2000, 501)
    assert scripts.claim(limit=1, ticket="n.2").envelopes == [b"a"]
    assert len(scripts.delayed("q")) == 2500


def test_more_than_a_chunk_is_held_as_it_was_taken(scripts: Scripts) -> None:
    names = [str(number).encode() for number in range(1203)]
    scripts.fill("q", *names)
    reply = scripts.claim(limit=2000)
    assert reply.taken == [QUEUE_KEY, 1, b"", names[:2], QUEUE_KEY, 3, b"", names[2:]]
    held = scripts.held()
    assert [held[f"{EPOCH}:{place}:P:q".encode()] for place in range(1, 1204)] == names


@pytest.mark.parametrize(("size", "taken"), [(1_000_000, 6), (100_000, 43)])
def test_a_claim_takes_no_more_than_some_megabytes_and_the_next_goes_on(
    scripts: Scripts, size: int, taken: int
) -> None:
    large = "x" * size
    scripts.fill("q", *([large] * 100), "last")
    assert len(scripts.claim(limit=200).envelopes) == taken
    assert len(scripts.waiting("q")) == 101 - taken
    assert len(scripts.claim(limit=200, ticket="n.2").envelopes) == taken


def revoked(scripts: Scripts, *cursors: int, newest: object) -> None:
    for cursor in cursors:
        scripts.ask("ZADD", "umbel.revokes.order", cursor, f"r{cursor}")
    scripts.ask("SET", "umbel.revokes.cursor", newest)


def test_no_message_overtakes_the_revokes_that_wait(scripts: Scripts) -> None:
    revoked(scripts, 1, 2, 3, newest=9)
    scripts.fill("q", "a")
    first = scripts.claim(page=2)
    assert (first.cursor, first.revokes, first.complete, first.envelopes) == (b"2", [b"r1", b"r2"], 0, [])
    rest = scripts.claim(page=2, after=2)
    assert (rest.cursor, rest.revokes, rest.complete, rest.envelopes) == (b"9", [b"r3"], 1, [b"a"])
    assert scripts.claim(page=100, after=2).revokes == [b"r3"]


@pytest.mark.parametrize("after", [3, 4])
def test_who_knows_the_newest_revoke_is_told_of_none(scripts: Scripts, after: int) -> None:
    revoked(scripts, 1, 2, 3, 5, newest=3)
    reply = scripts.claim(after=after)
    assert (reply.cursor, reply.revokes, reply.complete) == (str(after).encode(), [], 1)


def test_without_a_cursor_nobody_has_revoked_anything(scripts: Scripts) -> None:
    scripts.ask("ZADD", "umbel.revokes.order", 1, "r1")
    reply = scripts.claim(after=0)
    assert (reply.cursor, reply.revokes) == (b"0", [])


@pytest.mark.parametrize("unreadable", ["first", "-1", "1.5", "9007199254740992"])
def test_a_cursor_that_cannot_be_read_hides_no_revoke(scripts: Scripts, unreadable: str) -> None:
    revoked(scripts, 1, 2, newest=unreadable)
    reply = scripts.claim(after=1)
    assert (reply.cursor, reply.revokes, reply.complete) == (b"2", [b"r2"], 1)


def test_revokes_of_another_type_stop_no_claim(scripts: Scripts) -> None:
    scripts.ask("LPUSH", "umbel.revokes.cursor", "not a string")
    scripts.ask("SET", "umbel.revokes.order", "not a zset")
    scripts.fill("q", "a")
    reply = scripts.claim(after=1)
    assert (reply.cursor, reply.revokes, reply.envelopes) == (b"1", [], [b"a"])


def test_a_queue_that_cannot_be_taken_from_is_named_and_the_others_are_taken(scripts: Scripts) -> None:
    scripts.ask("SET", at_step("bad", 3), "not a list")
    scripts.ask("SET", "umbel.delayed.worse", "not a zset")
    scripts.fill("worse", "x")
    scripts.fill("q", "a")
    reply = scripts.claim("bad", "worse", "q")
    assert reply.envelopes == [b"a"]
    worse, why_worse, bad, why_bad = (one.decode() for one in reply.broken)
    assert (worse, why_worse) == (
        "worse",
        "the key 'P:umbel.delayed.worse' holds a string, not a zset: delete or rename it",
    )
    assert (bad, why_bad) == (
        "bad",
        "the key 'P:bad\\x06\\x163' holds a string, not a list: delete or rename it",
    )
    assert scripts.waiting("worse") == [b"x"]


def test_a_claim_puts_back_what_was_handed_over_and_takes_it_first(scripts: Scripts) -> None:
    scripts.fill("q", "c")
    scripts.hand(ADA, "q", '{"a": 1}')
    assert scripts.claim().envelopes == [b'{"a": 1}', b"c"]
    assert scripts.ask("LLEN", f"umbel.handed.{ADA}") == 0


def test_what_is_due_comes_first_and_earliest_due_first(scripts: Scripts) -> None:
    now = scripts.now
    scripts.fill("q", "c")
    scripts.delay("q", now - 5, "n.0:2:P:q\0b")
    scripts.delay("q", -9.0, "n.0:1:P:q\0a")
    scripts.delay("q", now - 1, f"n.0:3:P:{at_step('q', 3)}\0later\0part")
    scripts.delay("q", now + HOUR_S, "n.0:4:P:q\0not yet")
    assert scripts.claim().envelopes == [b"a", b"b", b"c", b"later\0part"]
    assert [member for member, _ in scripts.delayed("q")] == [b"n.0:4:P:q\0not yet"]


@pytest.mark.parametrize("member", ["no list at all", "n.0:1\0no list", "n:1:\0empty list"])
def test_what_was_parked_in_another_form_is_a_message_of_its_queue(scripts: Scripts, member: str) -> None:
    scripts.delay("q", 1.0, member)
    assert scripts.claim().envelopes == [member.encode()]
    assert scripts.delayed("q") == []


def test_what_is_due_and_refused_is_a_dead_letter_or_stays(scripts: Scripts) -> None:
    scripts.ask("SET", "bad", "not a list")
    scripts.delay("q", 1.0, "n.0:1:P:bad\0a")
    assert scripts.claim().envelopes == []
    (letter,) = scripts.letters()
    assert (letter["list"], letter["envelope"], letter["starts"]) == ("P:bad", "a", "0")
    assert letter["reason"] == "the key 'P:bad' holds a string, not a list: delete or rename it"
    scripts.ask("DEL", "umbel.dead")
    scripts.ask("SET", "umbel.dead", "not a stream")
    for place, due in enumerate((2.0, 3.0)):
        scripts.delay("q", due, f"n.0:{place}:P:bad\0b")
    scripts.delay("q", 4.0, "n.0:9:P:q\0c")
    assert scripts.claim(ticket="n.2").envelopes == [b"c"]
    assert len(scripts.delayed("q")) == 2


# -- adopt -------------------------------------------------------------------------------------------


def adopt(scripts: Scripts, envelope: str, *, epoch: str = EPOCH, ending: int = 7) -> int:
    field = f"n.2:1:{PREFIX}q"
    is_held: int = scripts.run("adopt", ADA, epoch, field, len(envelope), envelope[-ending:])[0]
    return is_held


def test_what_was_handed_over_is_adopted_once(scripts: Scripts) -> None:
    scripts.hold()
    scripts.hand(ADA, "q", "one-tag", "longer-two-tag", "two-tag", "two-gat", "two-tag")
    assert adopt(scripts, "two-tag") == 1
    assert scripts.held()[b"n.2:1:P:q"] == b"two-tag"
    assert scripts.waiting(f"umbel.handed.{ADA}") == [
        b"one-tag",
        b"longer-two-tag",
        b"two-tag",
        b"two-gat",
    ]
    assert adopt(scripts, "one-tag") == 1  # asked again: it is held
    assert scripts.ask("LLEN", f"umbel.handed.{ADA}") == 4


def test_an_adoption_tells_how_many_wait_behind_it(scripts: Scripts) -> None:
    scripts.hold()
    scripts.hand(ADA, "q", "one-tag")
    scripts.fill("q", "a", "b")
    args = (ADA, EPOCH, f"n.2:1:{PREFIX}q", 7, "one-tag")
    assert [scripts.run("adopt", *args) for _ in range(2)] == [[1, 2], [1, 2]]


@pytest.mark.parametrize("text", ["first-x", "between", "last--x"])
def test_it_is_found_wherever_it_lies(scripts: Scripts, text: str) -> None:
    scripts.hold()
    scripts.hand(ADA, "q", "first-x", "between", "last--x")
    assert adopt(scripts, text) == 1
    assert len(scripts.waiting(f"umbel.handed.{ADA}")) == 2


def test_another_message_is_not_taken_for_the_one_handed_over(scripts: Scripts) -> None:
    scripts.hold()
    scripts.hand(ADA, "q", "one-tag")
    for other in ("b-one-tag", "one-gat"):
        assert adopt(scripts, other) == 0
    assert scripts.held() == {b"epoch": EPOCH.encode()}
    assert (scripts.waiting(f"umbel.handed.{ADA}"), scripts.waiting("q")) == ([b"one-tag"], [])
    assert scripts.lease_of(ADA) is None


def test_when_the_claim_has_ended_what_was_handed_over_goes_back_as_redelivered(scripts: Scripts) -> None:
    scripts.hold()
    scripts.hand(ADA, "q", '{"a": 1}')
    assert adopt(scripts, '{"a": 1}', epoch="n.9") == 0
    assert scripts.waiting("q") == [b'{"umbel": {"redelivered": true}, "a": 1}']
    assert scripts.ask("EXISTS", f"umbel.handed.{ADA}") == 0


# -- abandon and reconcile -----------------------------------------------------------------------------


def test_abandoned_claims_go_back_in_order_and_late_ones_are_refused(scripts: Scripts) -> None:
    fields = {f"n.{claim:x}:{place}:P:q": f"{claim}-{place}" for claim in (2, 9, 16) for place in (2, 10)}
    scripts.hold(_1="kept")
    scripts.ask("HSET", f"umbel.inflight.{ADA}", *(part for pair in fields.items() for part in pair))
    scripts.fill("q", "last")
    assert scripts.run("abandon", ADA, 4, "n.2", "n.9", "n.10", "n.x") == 6
    assert scripts.waiting("q") == [b"2-2", b"2-10", b"9-2", b"9-10", b"16-2", b"16-10", b"last"]
    assert scripts.held() == {b"epoch": EPOCH.encode(), b"n.1:1:P:q": b"kept"}
    assert scripts.ask("HGET", "umbel.generations", ADA) == b"4"
    for generation, known in ((3, b"4"), (5, b"5")):
        assert scripts.run("abandon", ADA, generation, "n.2") == 0
        assert scripts.ask("HGET", "umbel.generations", ADA) == known
    scripts.ask("HSET", "umbel.generations", ADA, "none of ours")
    scripts.run("abandon", ADA, 1)
    assert scripts.ask("HGET", "umbel.generations", ADA) == b"1"


def test_abandoned_messages_are_not_marked_as_redelivered(scripts: Scripts) -> None:
    scripts.hold(_1='{"a": 1}')
    assert scripts.run("abandon", ADA, 1, EPOCH) == 1
    assert scripts.waiting("q") == [b'{"a": 1}']
    assert scripts.ask("HGET", "umbel.generations", ADA) == b"1"


def test_abandoned_messages_that_their_list_refuses_are_dead_letters(scripts: Scripts) -> None:
    scripts.hold(_1="a")
    scripts.ask("SET", "q", "not a list")
    assert scripts.run("abandon", ADA, 1, EPOCH) == 1
    assert [(letter["list"], letter["envelope"]) for letter in scripts.letters()] == [("P:q", "a")]
    scripts.hold(_1="b")
    scripts.run("reconcile", ADA, "0.0", 0)
    assert [letter["envelope"] for letter in scripts.letters()] == ["a", "b"]


def test_reconciling_names_what_is_missing_and_returns_what_nobody_knows(scripts: Scripts) -> None:
    scripts.hold(_1="held", _2="settling", _3='{"stray": 1}')
    scripts.ask("HSET", f"umbel.inflight.{ADA}", "n.5:1:P:q", "of a claim under way")
    under_way = ("n.5", "n.1:2:P:q")
    reply = scripts.run("reconcile", ADA, "0.0", 2, *under_way, "n.1:8:P:q", "n.1:1:P:q", "n.1:9:P:q")
    assert reply == [1, b"n.1:8:P:q", b"n.1:9:P:q"]
    assert scripts.waiting("q") == [b'{"umbel": {"redelivered": true}, "stray": 1}']
    assert set(scripts.held()) == {b"epoch", b"n.1:1:P:q", b"n.1:2:P:q", b"n.5:1:P:q"}
    assert scripts.run("reconcile", ADA, "0.0", 1, "n.1:9:P:q") == [3]
    assert scripts.held() == {b"epoch": EPOCH.encode()}


def test_what_was_claimed_since_the_comparison_was_asked_for_stays_claimed(scripts: Scripts) -> None:
    key = f"umbel.inflight.{ADA}"
    for field in ("ab.9:1:P:q", "ab.f:1:P:q", "ab.10:1:P:q", "cd.ff:1:P:q"):  # numbers are in hex
        scripts.ask("HSET", key, field, f'{{"of": "{field[:5]}"}}')
    assert scripts.run("reconcile", ADA, "ab.f", 0) == [3]
    assert set(scripts.held()) - {b"epoch"} == {b"ab.10:1:P:q"}


_CLAIM = (ADA, LEASE_S, EPOCH, 1, 10, 0, 10, "q")
_ADOPT = (ADA, EPOCH, "f", 1, "x")
_REVOKE = ("record", 10, "k", 4e9, "{}")


@pytest.mark.parametrize(
    ("key", "wanted", "name", "args"),
    [
        ("umbel.inflight.ada", "hash", "abandon", (ADA, 1)),
        ("umbel.generations", "hash", "abandon", (ADA, 1)),
        ("umbel.inflight.ada", "hash", "reconcile", (ADA, "0.0", 0)),
        ("umbel.inflight.ada", "hash", "adopt", _ADOPT),
        ("umbel.handed.ada", "list", "adopt", _ADOPT),
        ("umbel.generations", "hash", "claim", _CLAIM),
        ("umbel.inflight.ada", "hash", "claim", _CLAIM),
        ("umbel.owners", "zset", "claim", _CLAIM),
        ("umbel.owners", "zset", "owners", ("renew", LEASE_S, ADA, 0)),
        ("umbel.dead", "stream", "bury", ("", "P:q", "a", "why")),
        ("umbel.failed", "stream", "bury", ("10 60", "P:q", "a", "why")),
        ("umbel.unique.k", "string", "unique", ("hold", "k", "one", 60_000)),
        ("umbel.revokes", "hash", "revoke", _REVOKE),
        ("umbel.revokes.order", "zset", "revoke", _REVOKE),
        ("umbel.revokes.expiry", "zset", "revoke", _REVOKE),
        ("umbel.recorders", "hash", "event_log", ("append", 10, "k", "{}")),
        ("umbel.events", "stream", "event_log", ("append", 10, "k", "{}")),
        ("umbel.askers.e", "zset", "askers", ("enter", "e", 60, "m")),
        ("_kombu.binding.e", "set", "askers", ("enter", "e", 60, "m")),
        ("{coord}:l:beat", "hash", "lease", (1000, "acquire", "beat", ADA, 10)),
        ("{coord}:meta", "hash", "lease", (1000, "acquire", "beat", ADA, 10)),
    ],
)
def test_without_a_key_of_its_type_nothing_is_done_and_the_key_is_named(
    scripts: Scripts, key: str, wanted: str, name: str, args: tuple[object, ...]
) -> None:
    make, found = ("LPUSH", "list") if wanted == "string" else ("SET", "string")
    scripts.ask(make, key, "not ours")
    with pytest.raises(
        ReplyError, match=f"^(ERR )?REFUSED the key 'P:{key}' holds a {found}, not a {wanted}: "
    ):
        scripts.run(name, *args)
    assert scripts.keys() - {f"{PREFIX}umbel.contact"} == {f"{PREFIX}{key}"}
