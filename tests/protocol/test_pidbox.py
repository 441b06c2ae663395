"""The mailbox and the collection of replies, without any broker (P1, P4, P7, P8)."""

import sys
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from umbel.protocol.clock import LamportClock
from umbel.protocol.delivery.trust import Doubt, Doubted, Signed
from umbel.protocol.pidbox import (
    EXPIRY_GRACE_S,
    MATCHERS,
    PATTERN_MAX,
    TICKETS_MAX,
    Collection,
    Handle,
    Mailbox,
    Malformed,
    MemberReport,
    Refused,
    Reply,
    Request,
    RequestIgnored,
    is_for_member,
    is_meant,
)

NODE = "w1@east"
NOW = 1_800_000_000.0
PING = Request("ping")


def mailbox(*refused: str, clock: LamportClock | None = None) -> Mailbox:
    forward = (clock or LamportClock()).forward
    return Mailbox(NODE, forward, refusal_of=lambda method: "not allowed" if method in refused else "")


@pytest.mark.parametrize(
    ("request_", "is_for_us"),
    [
        (PING, True),
        (PING.replaced(destination=(NODE,)), True),
        (PING.replaced(destination=("w2@east", NODE)), True),
        (PING.replaced(destination=("w2@east",)), False),
        (PING.replaced(destination=()), False),
        (PING.replaced(destination=("@v2",)), True),
        (PING.replaced(destination=("w1",)), False),
        (PING.replaced(pattern="w*@east", matcher="glob"), True),
        (PING.replaced(pattern="w[23]@*", matcher="glob"), False),
        (PING.replaced(pattern="W1@*", matcher="glob"), False),
        (PING.replaced(pattern=r"w\d+@(east|west)$", matcher="pcre"), True),
        (PING.replaced(pattern="east", matcher="pcre"), False),  # anchored at the start, as Celery has it
        (PING.replaced(pattern="w2*", matcher="glob", destination=(NODE,)), True),
        (PING.replaced(pattern="w1*", matcher="glob", destination=("w2@east",)), False),
        (PING.replaced(pattern="w2*"), True),  # without a matcher there is no pattern
    ],
)
def test_a_node_knows_which_requests_are_for_it(request_: Request, is_for_us: bool) -> None:
    (effect,) = mailbox().step(request_, NOW)
    assert isinstance(effect, Handle if is_for_us else RequestIgnored)
    assert is_meant(request_, NODE) is is_for_us


@given(st.lists(st.booleans(), max_size=20))
def test_every_message_moves_the_clock_before_it_is_handled(are_malformed: list[bool]) -> None:
    """P4, also for what is malformed, refused or for others."""
    clock = LamportClock(10)
    box = mailbox(clock=clock)
    for number, is_malformed in enumerate(are_malformed, start=1):
        box.step(Malformed("rubbish") if is_malformed else PING, NOW)
        assert clock.value == 10 + number
    assert box.received == len(are_malformed) and box.malformed == sum(are_malformed)


@pytest.mark.parametrize("late_s", [-60.0, 0.0, EXPIRY_GRACE_S])
def test_a_request_that_has_not_expired_is_handled(late_s: float) -> None:
    assert mailbox().step(PING.replaced(expires_at=NOW - late_s), NOW) == [
        Handle(PING.replaced(expires_at=NOW - late_s))
    ]


def test_an_expired_request_is_refused_with_the_reason() -> None:
    """P8."""
    late = PING.replaced(expires_at=NOW - EXPIRY_GRACE_S - 2.5)
    box = mailbox()
    (effect,) = box.step(late, NOW)
    assert isinstance(effect, Refused) and "expired 7.5 s before" in effect.why
    assert box.refused == 1


def test_a_command_that_is_not_allowed_is_refused_with_the_reason() -> None:
    box = mailbox("shutdown")
    assert box.step(Request("shutdown"), NOW) == [Refused(Request("shutdown"), "not allowed")]
    assert isinstance(box.step(PING, NOW)[0], Handle)


def test_a_ticket_is_carried_out_once() -> None:
    """P8."""
    box, asked = mailbox(), PING.replaced(ticket="t")
    assert box.step(asked, NOW) == [Handle(asked)]
    assert isinstance(box.step(asked, NOW)[0], RequestIgnored)
    assert isinstance(box.step(asked.replaced(method="revoke"), NOW)[0], RequestIgnored)
    assert box.repeated == 2
    assert [type(one) for _ in range(2) for one in box.step(PING, NOW)] == [Handle, Handle]


def test_a_ticket_for_others_is_not_remembered() -> None:
    box = mailbox()
    box.step(PING.replaced(ticket="t", destination=("w2@east",)), NOW)
    assert isinstance(box.step(PING.replaced(ticket="t"), NOW)[0], Handle)


def test_the_last_tickets_are_remembered_and_no_more() -> None:
    box = mailbox()
    for number in range(TICKETS_MAX + 1):
        box.step(PING.replaced(ticket=str(number)), NOW)
    assert isinstance(box.step(PING.replaced(ticket="1"), NOW)[0], RequestIgnored)
    assert isinstance(box.step(PING.replaced(ticket="0"), NOW)[0], Handle)


@pytest.mark.parametrize(
    ("pattern", "matcher", "problem"),
    [
        ("w*", "regex", "matcher 'regex' is unknown"),
        ("(", "pcre", "not a valid regular expression"),
        ("x" * (PATTERN_MAX + 1), "glob", "limit is 1000"),
        ("(?x)(a+) +$", "pcre", "not a valid regular expression"),
    ],
)
def test_a_pattern_that_cannot_be_used_is_refused(pattern: str, matcher: str, problem: str) -> None:
    (effect,) = mailbox().step(PING.replaced(pattern=pattern, matcher=matcher), NOW)
    assert isinstance(effect, Refused) and problem in effect.why


@pytest.mark.parametrize(
    ("pattern", "matcher"),
    [
        ("(?x)(w+) +$", "pcre"),
        ("(w+)(?# and so on)+$", "pcre"),
        ("(" * 20 + "w" + ")+" * 20 + "$", "pcre"),
        ("(a?){30}a{30}", "pcre"),
        ("*1*" * 330, "glob"),
    ],
)
def test_a_pattern_of_any_kind_is_answered_at_once(pattern: str, matcher: str) -> None:
    """Anyone who can write to the broker can send one to every worker."""
    box = Mailbox("w" * 100 + "!", LamportClock().forward, refusal_of=lambda _: "")
    (effect,) = box.step(PING.replaced(pattern=pattern, matcher=matcher), NOW)
    assert isinstance(effect, Refused | RequestIgnored)


def test_a_regular_expression_is_refused_with_the_reason_where_it_cannot_be_matched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "re2", None)
    (effect,) = mailbox().step(PING.replaced(pattern="w1", matcher="pcre"), NOW)
    assert isinstance(effect, Refused) and "need google-re2" in effect.why


def test_what_needs_a_signature_is_matched_after_it_was_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    matched: list[str] = []

    def matcher(pattern: str) -> Callable[[str], bool]:
        matched.append(pattern)
        return str.isascii

    monkeypatch.setitem(MATCHERS, "glob", matcher)
    unsigned, signed = Doubted(Doubt.UNSIGNED, "no signature"), Signed("key", NOW, "1")
    asked = Request("shutdown", pattern="w*", matcher="glob")
    (effect,) = mailbox().step(asked.replaced(proof=unsigned), NOW)
    assert isinstance(effect, Refused) and effect.why == "unsigned: no signature" and matched == []
    (effect,) = mailbox().step(asked.replaced(proof=signed), NOW)
    assert isinstance(effect, Handle) and matched


# -- the caller's side -------------------------------------------------------------------------------


def collection(timeout_s: float | None = 1.0, **who: Any) -> Collection:
    return Collection(timeout_s=timeout_s, **who)


def test_a_collection_ends_when_everyone_who_was_named_has_answered() -> None:
    asked = collection(expected=["a@x", "b@x"])
    asked.take(Reply("a@x", 1), 0.0)
    assert not asked.is_complete()
    asked.take(Reply("b@x", 2), 0.0)
    assert asked.is_complete()
    assert (asked.answers().replies, asked.answers().silent) == ({"a@x": 1, "b@x": 2}, ())


def test_a_collection_ends_when_all_members_have_answered() -> None:
    """P7: who the members are is known from the answers themselves."""
    members = (MemberReport("a@x"), MemberReport("b@x", "suspect", 41.0), MemberReport("c@x", "left", 9.0))
    asked = collection()
    assert not asked.is_complete()
    asked.take(Reply("a@x", 1, members=members), 0.0)
    assert not asked.is_complete()
    assert asked.answers().silent == (MemberReport("b@x", "suspect", 41.0),)
    asked.take(Reply("b@x", 2), 0.0)
    assert asked.is_complete() and asked.answers().silent == ()


def test_who_heard_a_member_last_is_believed() -> None:
    asked = collection()
    asked.take(Reply("a@x", 1, members=(MemberReport("b@x", "suspect", 41.0),)), 0.0)
    asked.take(Reply("c@x", 1, members=(MemberReport("b@x", "alive", 1.0),)), 0.0)
    assert asked.answers().silent == (MemberReport("b@x", "alive", 1.0),)


def test_a_node_that_the_others_have_given_up_is_named_and_not_waited_for() -> None:
    """One of them was cut off itself, and has not judged."""
    asked = collection()
    judged = (MemberReport("a@x"), MemberReport("b@x"), MemberReport("c@x", "lost", 20.0))
    cut_off = (MemberReport("a@x", "alive", 0.5), MemberReport("b@x"), MemberReport("c@x", "alive", 19.9))
    asked.take(Reply("a@x", 1, members=judged), 0.0)
    asked.take(Reply("b@x", 2, members=cut_off), 0.0)
    assert asked.is_complete()
    answers = asked.answers()
    assert (answers.silent, answers.lost) == ((), (MemberReport("c@x", "lost", 20.0),))


def test_an_answer_of_a_node_that_no_member_list_has_is_unknown() -> None:
    asked = collection(expected=["a@x"])
    asked.take(Reply("z@x", 1), 0.0)
    assert not asked.is_complete()
    answers = asked.answers()
    assert answers.unknown == ("z@x",) and answers.silent == (MemberReport("a@x", "unknown"),)


def test_a_collection_without_any_knowledge_waits_for_its_deadline() -> None:
    asked = collection()
    asked.take(Reply("a@x", 1), 0.0)
    assert not asked.is_complete() and asked.answers().unknown == ()


def test_a_collection_ends_when_all_that_heard_the_request_have_answered() -> None:
    asked = collection()
    asked.sent(0.0, heard=2, is_heard=True, to_all=True)
    asked.take(Reply("a@x", 1), 0.0)
    assert not asked.is_complete()
    asked.take(Reply("b@x", 1), 0.0)
    assert asked.is_complete()
    nobody = collection()
    nobody.sent(0.0, heard=0, is_heard=False, to_all=False)
    assert nobody.is_complete()


def test_the_time_for_replies_begins_when_the_request_was_sent() -> None:
    """However long it took to connect and to send."""
    asked = collection(1.0)
    asked.sent(100.0, heard=None, is_heard=True, to_all=True)
    assert asked.deadline == 101.0
    asked.take(Reply("a@x", 1), 100.9)
    assert asked.deadline == 101.0


def test_by_default_those_who_are_known_to_be_there_have_five_seconds() -> None:
    named = collection(None, expected=["a@x", "b@x"])
    counted = collection(None)
    limited = collection(None, limit=3)
    for asked, heard in ((named, None), (counted, 2), (limited, None)):
        asked.sent(100.0, heard=heard, is_heard=False, to_all=asked is not named)
        asked.take(Reply("a@x", 1), 100.1)
        assert asked.deadline == 105.0
    members = collection(None)
    members.sent(100.0, heard=None, is_heard=True, to_all=True)
    assert members.deadline == 105.0  # somebody listens
    members.take(Reply("a@x", 1, members=(MemberReport("a@x"), MemberReport("b@x"))), 100.1)
    assert members.deadline == 105.0


def test_by_default_a_second_of_silence_is_enough_where_nobody_knows_who_answers() -> None:
    asked = collection(None)
    asked.sent(100.0, heard=None, is_heard=False, to_all=True)
    assert asked.deadline == 101.0
    asked.take(Reply("celery@x", 1), 100.75)
    assert asked.deadline == 101.75
    asked.take(Reply("celery@y", 1), 104.75)
    assert asked.deadline == 105.0
    matched = collection(None, matches=lambda known: known.node != "a@x")
    matched.sent(100.0, heard=7, is_heard=True, to_all=False)  # most of them are not meant
    matched.take(Reply("celery@x", 1), 100.5)
    assert matched.deadline == 101.5


def test_a_limit_ends_a_collection() -> None:
    asked = collection(limit=2)
    asked.take(Reply("a@x", 1), 0.0)
    asked.take(Reply("a@x", 1), 0.0)
    assert not asked.is_complete()
    asked.take(Reply("b@x", 1), 0.0)
    assert asked.is_complete()


def test_only_members_that_are_meant_are_waited_for() -> None:
    request = PING.replaced(destination=("@v2",))
    ours, theirs = MemberReport("a@x"), MemberReport("celery@x", is_umbel=False)
    assert is_for_member(request, ours) and not is_for_member(request, theirs)
    asked = collection(expected=request.destination or (), matches=lambda one: is_for_member(request, one))
    asked.take(Reply("a@x", 1, members=(ours, theirs)), 0.0)
    assert asked.is_complete()
    assert is_for_member(PING.replaced(pattern="cel*", matcher="glob"), theirs)


def signed_mailbox() -> Mailbox:
    return Mailbox(
        "w@h",
        LamportClock().forward,
        refusal_of=lambda _: "",
        changes=lambda method: method != "ping",
        since=lambda: NOW,
    )


def test_a_command_that_changes_something_must_be_signed() -> None:
    mailbox = signed_mailbox()
    unsigned = Doubted(Doubt.UNSIGNED, "why")
    (effect,) = mailbox.step(Request("shutdown", proof=unsigned), NOW)
    assert effect == Refused(Request("shutdown", proof=unsigned), "unsigned: why")
    assert isinstance(mailbox.step(Request("ping", proof=unsigned), NOW)[0], Handle)
    assert isinstance(mailbox.step(Request("shutdown", proof=Signed("k", NOW, "m")), NOW)[0], Handle)
    assert mailbox.distrusted == 1


def test_a_wrong_signature_is_refused_even_where_none_is_needed() -> None:
    (effect,) = signed_mailbox().step(Request("ping", proof=Doubted(Doubt.FORGED, "why")), NOW)
    assert isinstance(effect, Refused)


def test_a_copy_of_a_signed_command_is_passed_over_and_burns_no_ticket() -> None:
    mailbox = signed_mailbox()
    first, copy = (Request("shutdown", ticket=ticket, proof=Signed("k", NOW, "m")) for ticket in ("a", "b"))
    assert isinstance(mailbox.step(first, NOW)[0], Handle)
    assert isinstance(mailbox.step(copy, NOW)[0], RequestIgnored)
    other = Request("shutdown", ticket="b", proof=Signed("k", NOW, "n"))
    assert isinstance(mailbox.step(other, NOW)[0], Handle)
