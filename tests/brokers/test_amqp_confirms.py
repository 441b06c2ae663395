"""The account of what RabbitMQ has answered for: ranges of numbers, and messages that come back."""

from collections.abc import Sequence
from functools import partial

from hypothesis import given
from hypothesis import strategies as st

from umbel.brokers.amqp.confirms import Batch, Sent, Unconfirmed
from umbel.brokers.amqp.frames import Incoming, Method
from umbel.brokers.amqp.handshake import ChannelClosed, Undecided

A: Sent = ("", "celery", b"p", b"a")
B: Sent = ("", "celery", b"p", b"b")
C: Sent = ("", "other", b"p", b"c")


def returned(sent: Sent) -> Incoming:
    exchange, key, properties, body = sent
    return Incoming(1, Method.BASIC_RETURN, (312, "NO_ROUTE", exchange, key), properties, body)


def put(unconfirmed: Unconfirmed, *sent: Sent) -> Batch:
    return unconfirmed.add(len(sent), lambda: sent, object())


answers = st.lists(st.tuples(st.integers(1, 24), st.booleans(), st.booleans()), max_size=30)


@given(sizes=st.lists(st.integers(1, 6), min_size=1, max_size=6), said=answers)
def test_ranges_account_as_a_list_of_numbers_would(
    sizes: Sequence[int], said: Sequence[tuple[int, bool, bool]]
) -> None:
    unconfirmed, ended = Unconfirmed(), list[int]()
    batches = [unconfirmed.add(size, tuple, object()) for size in sizes]
    for nth, batch in enumerate(batches):
        batch.waiters.append(partial(ended.append, nth))
    owner = [nth for nth, size in enumerate(sizes) for _ in range(size)]
    waiting, refused = dict(enumerate(owner, 1)), [set[int]() for _ in sizes]
    for number, multiple, accepted in said:
        unconfirmed.answer(number, multiple=multiple, accepted=accepted)
        for one in [one for one in waiting if one == number or (multiple and one <= number)]:
            nth = waiting.pop(one)
            if not accepted:
                refused[nth].add(one - batches[nth].first)
    for nth, batch in enumerate(batches):
        assert batch.missing == list(waiting.values()).count(nth)
        assert sorted(batch.refused) == sorted(refused[nth])
    assert sorted(ended) == [nth for nth, batch in enumerate(batches) if not batch.missing]
    assert len(unconfirmed) == len(batches) - len(ended)


def test_a_message_that_comes_back_goes_to_who_sent_it() -> None:
    """Both sent to one queue, and it was deleted in between: the first was taken, and the second was not."""
    unconfirmed = Unconfirmed()
    first, second = put(unconfirmed, A), put(unconfirmed, B, B)
    unconfirmed.take_back(returned(B))
    unconfirmed.take_back(returned(B))
    assert not first.returned and len(second.returned) == 2


def test_a_message_whose_properties_the_server_wrote_anew_goes_to_who_sent_on_that_way() -> None:
    unconfirmed = Unconfirmed()
    first, second = put(unconfirmed, A), put(unconfirmed, C)
    unconfirmed.take_back(returned((C[0], C[1], b"other", C[3])))
    assert not first.returned and len(second.returned) == 1
    unconfirmed.take_back(returned((C[0], C[1], b"other", C[3])))
    assert len(second.returned) == 1, "it was one"


def test_what_was_under_way_beside_others_when_the_channel_closed_is_undecided() -> None:
    unconfirmed, closed = Unconfirmed(), ChannelClosed(404, "no exchange")
    alone = put(unconfirmed, A)
    unconfirmed.fail(closed)
    assert alone.error is closed
    first, second = put(unconfirmed, A), put(unconfirmed, B)
    assert first.first == 1, "a new channel counts from one"
    unconfirmed.fail(closed)
    assert isinstance(first.error, Undecided) and isinstance(second.error, Undecided)


def test_pieces_of_one_sender_are_refused_together() -> None:
    unconfirmed, closed = Unconfirmed(), ChannelClosed(404, "no exchange")
    sender = object()
    pieces = [unconfirmed.add(2, tuple, sender) for _ in range(2)]
    unconfirmed.fail(closed)
    assert [piece.error for piece in pieces] == [closed, closed]
