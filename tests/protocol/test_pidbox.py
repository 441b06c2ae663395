"""The mailbox and the collection of replies, without any broker (P1, P4, P7, P8)."""

import re
from time import perf_counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from umbel.protocol.clock import LamportClock
from umbel.protocol.delivery.trust import Doubt, Doubted, Signed
from umbel.protocol.pidbox import (
    EXPIRY_GRACE_S,
    PATTERN_MAX,
    TICKETS_MAX,
    Collection,
    Handle,
    Known,
    Mailbox,
    Malformed,
    PassedOver,
    Refused,
    Reply,
    Request,
    is_costly,
    is_for_member,
    is_meant,
    pattern_problem,
)

NODE = "w1@east"
NOW = 1_800_000_000.0
PING = Request("ping")


def mailbox(*refused: str, clock: LamportClock | None = None) -> Mailbox:
    return Mailbox(
        NODE, clock or LamportClock(), refusal_of=lambda method: "not allowed" if method in refused else ""
    )


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
    assert isinstance(effect, Handle if is_for_us else PassedOver)
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
    assert isinstance(box.step(asked, NOW)[0], PassedOver)
    assert isinstance(box.step(asked.replaced(method="revoke"), NOW)[0], PassedOver)
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
    assert isinstance(box.step(PING.replaced(ticket="1"), NOW)[0], PassedOver)
    assert isinstance(box.step(PING.replaced(ticket="0"), NOW)[0], Handle)


@pytest.mark.parametrize(
    ("pattern", "matcher", "problem"),
    [
        ("w*", "regex", "matcher 'regex' is unknown"),
        ("(", "pcre", "not a valid regular expression"),
        ("x" * (PATTERN_MAX + 1), "glob", "limit is 1000"),
        ("(a+)+$", "pcre", "too long"),
        ("(a|a)*b", "pcre", "too long"),
        ("(a?){30}a{30}", "pcre", "too long"),
        ("(?:x(?:a*)b)+", "pcre", "too long"),
        ("a*a*a*a*a*b", "pcre", "too long"),
        ("*a*a*a*a*", "glob", "at most 4 '*'"),
    ],
)
def test_a_pattern_that_cannot_be_used_is_refused(pattern: str, matcher: str, problem: str) -> None:
    (effect,) = mailbox().step(PING.replaced(pattern=pattern, matcher=matcher), NOW)
    assert isinstance(effect, Refused) and problem in effect.why


@pytest.mark.parametrize(
    "pattern", [r"w\d+@.*", r"^(?:w1|w2|w33)@east$", r"[a-z*+]+@(east|west)\.\w+", r"w\*\+\?@e", "(w1)@e+"]
)
def test_patterns_that_people_write_are_not_costly(pattern: str) -> None:
    assert pattern_problem(pattern, "pcre") == ""


@given(
    st.lists(
        st.sampled_from(["a", "b", "(", ")", "*", "+", "?", "|", "{2,}", ".", "[ab]", "(?:"]), max_size=14
    )
)
def test_a_pattern_that_is_let_through_is_matched_at_once(parts: list[str]) -> None:
    pattern = "".join(parts)
    if pattern_problem(pattern, "pcre"):
        return
    began = perf_counter()
    re.match(pattern, "a" * 40 + "!")
    assert perf_counter() - began < 5.0  # one that was costly would take years


def test_nesting_is_seen_behind_escapes_and_classes() -> None:
    assert is_costly(r"(\)+)+") and is_costly(r"([)]+)*") and not is_costly(r"\(a+\)+")


# -- the caller's side -------------------------------------------------------------------------------


def test_a_collection_ends_when_everyone_who_was_named_has_answered() -> None:
    asked = Collection(deadline=1.0, expected=["a@x", "b@x"])
    asked.take(Reply("a@x", 1))
    assert not asked.is_complete()
    asked.take(Reply("b@x", 2))
    assert asked.is_complete()
    assert (asked.answers().replies, asked.answers().silent) == ({"a@x": 1, "b@x": 2}, ())


def test_a_collection_ends_when_all_members_have_answered() -> None:
    """P7: who the members are is known from the answers themselves."""
    members = (Known("a@x"), Known("b@x", "suspect", 41.0), Known("c@x", "left", 9.0))
    asked = Collection(deadline=1.0)
    assert not asked.is_complete()
    asked.take(Reply("a@x", 1, members=members))
    assert not asked.is_complete()
    assert asked.answers().silent == (Known("b@x", "suspect", 41.0),)
    asked.take(Reply("b@x", 2))
    assert asked.is_complete() and asked.answers().silent == ()


def test_who_heard_a_member_last_is_believed() -> None:
    asked = Collection(deadline=1.0)
    asked.take(Reply("a@x", 1, members=(Known("b@x", "suspect", 41.0),)))
    asked.take(Reply("c@x", 1, members=(Known("b@x", "alive", 1.0),)))
    assert asked.answers().silent == (Known("b@x", "alive", 1.0),)


def test_a_node_that_the_others_have_given_up_is_named_and_not_waited_for() -> None:
    """One of them was cut off itself, and has not judged."""
    asked = Collection(deadline=1.0)
    judged = (Known("a@x"), Known("b@x"), Known("c@x", "lost", 20.0))
    cut_off = (Known("a@x", "alive", 0.5), Known("b@x"), Known("c@x", "alive", 19.9))
    asked.take(Reply("a@x", 1, members=judged))
    asked.take(Reply("b@x", 2, members=cut_off))
    assert asked.is_complete()
    answers = asked.answers()
    assert (answers.silent, answers.lost) == ((), (Known("c@x", "lost", 20.0),))


def test_an_answer_of_a_node_that_no_member_list_has_is_unknown() -> None:
    asked = Collection(deadline=1.0, expected=["a@x"])
    asked.take(Reply("z@x", 1))
    assert not asked.is_complete()
    answers = asked.answers()
    assert answers.unknown == ("z@x",) and answers.silent == (Known("a@x", "unknown"),)


def test_a_collection_without_any_knowledge_waits_for_its_deadline() -> None:
    asked = Collection(deadline=1.0)
    asked.take(Reply("a@x", 1))
    assert not asked.is_complete() and asked.answers().unknown == ()


def test_a_collection_ends_when_all_that_heard_the_request_have_answered() -> None:
    asked = Collection(deadline=1.0)
    asked.heard_by(2)
    asked.take(Reply("a@x", 1))
    assert not asked.is_complete()
    asked.take(Reply("b@x", 1))
    assert asked.is_complete()
    nobody = Collection(deadline=1.0)
    nobody.heard_by(0)
    assert nobody.is_complete()


def test_a_limit_ends_a_collection() -> None:
    asked = Collection(deadline=1.0, limit=2)
    asked.take(Reply("a@x", 1))
    asked.take(Reply("a@x", 1))
    assert not asked.is_complete()
    asked.take(Reply("b@x", 1))
    assert asked.is_complete()


def test_only_members_that_are_meant_are_waited_for() -> None:
    request = PING.replaced(destination=("@v2",))
    ours, theirs = Known("a@x"), Known("celery@x", is_umbel=False)
    assert is_for_member(request, ours) and not is_for_member(request, theirs)
    asked = Collection(
        deadline=1.0, expected=request.destination or (), matches=lambda one: is_for_member(request, one)
    )
    asked.take(Reply("a@x", 1, members=(ours, theirs)))
    assert asked.is_complete()
    assert is_for_member(PING.replaced(pattern="cel*", matcher="glob"), theirs)


def signed_mailbox() -> Mailbox:
    return Mailbox(
        "w@h",
        LamportClock(),
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
    assert isinstance(mailbox.step(copy, NOW)[0], PassedOver)
    other = Request("shutdown", ticket="b", proof=Signed("k", NOW, "n"))
    assert isinstance(mailbox.step(other, NOW)[0], Handle)
