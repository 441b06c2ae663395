"""What the Pub/Sub broker decides without a server: addresses, names, marks, answers, refusals."""

import json

import pytest

from umbel.brokers.gcpubsub.http import (
    AcksRefused,
    Answer,
    AnswerReader,
    Call,
    NotFound,
    address_from_url,
    encode_request,
    error_of,
)
from umbel.brokers.gcpubsub.posts import (
    MESSAGE_MAX_BYTES,
    REQUEST_MAX,
    MessageState,
    Names,
    Post,
    read_letter,
    read_state,
    requests,
    task,
)
from umbel.brokers.interface import BrokerSettings, DeclaredBinding, DeclaredExchange, DeclaredQueue
from umbel.brokers.options import Support, changes_of, judge_options
from umbel.brokers.registry import open_broker
from umbel.errors import AccessRefused, BadURL, BrokerRefused, BrokerUnavailable
from umbel.wire.message import Message, Outgoing

URL = "gcpubsub://projects/shop"


@pytest.fixture(autouse=True)
def no_emulator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PUBSUB_EMULATOR_HOST", raising=False)


def test_an_address_names_a_project_at_google_or_at_an_emulator(monkeypatch: pytest.MonkeyPatch) -> None:
    found = address_from_url(f"{URL}?exactly_once=true")
    assert (found.project, found.authority, found.tls) == ("shop", "pubsub.googleapis.com", True)
    assert found.exactly_once and not found.is_emulator
    monkeypatch.setenv("PUBSUB_EMULATOR_HOST", "localhost:8432")
    found = address_from_url(URL)
    assert (found.authority, found.tls, found.is_emulator) == ("localhost:8432", False, True)


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("gcpubsub://shop", "names a project"),
        ("gcpubsub://projects/", "not a project id"),
        (f"{URL}?exactly_once=maybe", "true or false"),
        (f"{URL}?speed=9", "unknown option 'speed'"),
        (f"{URL}?endpoint=ftp://x", "https://HOST"),
    ],
)
def test_a_wrong_address_is_refused_with_what_to_write(url: str, problem: str) -> None:
    with pytest.raises(BadURL, match=problem):
        address_from_url(url)


def test_google_needs_the_extra_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("umbel.brokers.registry.find_spec", lambda _: None)
    with pytest.raises(BadURL, match=r"umbel\[gcpubsub\]"):
        open_broker(BrokerSettings(URL))


def test_queues_have_the_names_that_celery_gives_them() -> None:
    place = Names(BrokerSettings(URL)).place("mail.eu")
    assert (place.topic, place.subscription) == ("mail.eu", "kombu-mail-eu")
    assert place.filter == 'attributes.routing_key="mail.eu"'
    assert Names(BrokerSettings(URL)).subscription("w1@web.celery.pidbox") == "kombu-w1_web-celery-pidbox"


def test_a_queue_that_pubsub_cannot_have_is_refused_by_name() -> None:
    topic = DeclaredExchange("all", "topic")
    declared = DeclaredQueue("routed", bindings=(DeclaredBinding(topic, "a.#"),))
    names = Names(BrokerSettings(URL, declared=(declared,)))
    for queue, problem in (("no", "3 to 255"), ("googly", "goog"), ("a b c", "letters"), ("routed", "topic")):
        with pytest.raises(BrokerRefused, match=f"{queue!r}.*{problem}"):
            names.place(queue)


def test_what_is_too_large_or_due_too_late_is_refused_by_name() -> None:
    names = Names(BrokerSettings(URL))
    with pytest.raises(BrokerRefused, match="exceeds the limit of Pub/Sub"):
        task(Outgoing("celery", Message(b"{}", b"x" * MESSAGE_MAX_BYTES)), names, 0.0)
    with pytest.raises(BrokerRefused, match="coordination_store"):
        task(Outgoing("celery", Message(b"{}", b"x"), 90_000.0), names, 0.0)


@pytest.mark.parametrize(
    ("attributes", "mark"),
    [
        ({}, MessageState()),
        ({"umbel-starts": "2", "umbel-ran": "1", "umbel-due": "17.5"}, MessageState(2, True, 17.5)),
        ({"umbel-starts": "-1", "umbel-due": "nan"}, MessageState()),
        ({"umbel-starts": "9" * 400, "umbel-due": "1e999"}, MessageState()),
        ({"umbel-starts": "٣", "umbel-ran": "yes"}, MessageState()),
    ],
)
def test_a_mark_is_read_or_marks_nothing(attributes: dict[str, str], mark: MessageState) -> None:
    assert read_state(attributes) == mark


def test_requests_hold_one_topic_in_order_within_the_limits() -> None:
    sent = [Post("ab"[number % 2], b"x", {}, "") for number in range(2 * REQUEST_MAX + 2)]
    found = list(requests(sent))
    assert [len(places) for places in found] == [REQUEST_MAX, REQUEST_MAX, 1, 1]
    assert all(len({sent[place].topic for place in places}) == 1 for places in found)
    assert all(places == sorted(places) for places in found)


def test_what_pubsub_itself_buried_is_a_letter_too() -> None:
    letter, data = read_letter(b"no envelope", "17", "2026-11-17T04:06:13.660123456Z")
    assert (letter.letter_id, data) == ("gcpubsub-17", b"no envelope")
    assert "delivered too often" in letter.reason and letter.buried_at > 1_700_000_000


@pytest.mark.parametrize(
    "change",
    [
        {"starts": -1},
        {"starts": 10**30},
        {"starts": "many"},
        {"buried_at": 1e300},
        {"buried_at": -1.0},
        {"buried_at": None},
        {"queue": "q" * 300},
        {"queue": None},
        {"umbel_letter": 7},
        {"umbel_letter": "x" * 300},
        {"data": "no base64!"},
        {"reason": []},
    ],
)
def test_a_letter_with_values_that_no_writer_of_ours_has_is_a_message_as_it_is(
    change: dict[str, object],
) -> None:
    """Anybody may publish there; a time like that could not even be shown, and all letters with it."""
    whole = {"umbel_letter": "a", "queue": "q", "reason": "r", "starts": 1, "buried_at": 1.0, "data": ""}
    letter, _ = read_letter(json.dumps(whole).encode(), "17", "")
    assert (letter.letter_id, letter.starts) == ("a", 1)
    data = json.dumps(whole | change).encode()
    for body in (data, data[:-1] + b', "more": ' + b"[" * 100_000, b"[" * 100_000):
        letter, raw = read_letter(body, "17", "")
        assert (letter.letter_id, letter.starts, raw) == ("gcpubsub-17", 0, body)


def test_an_answer_is_read_in_whatever_pieces_it_comes() -> None:
    plain = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"
    chunked = b"HTTP/1.1 404 No\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nhel\r\n2;x\r\nlo\r\n0\r\n\r\n"
    for data, status in ((plain, 200), (chunked, 404)):
        for size in (1, 7, len(data)):
            reader, answer = AnswerReader(), None
            for first in range(0, len(data), size):
                answer = answer or reader.feed(data[first : first + size])
            assert answer == Answer(status, b"hello", True)
    assert b"authorization: Bearer t\r\n" in encode_request(
        Call("GET", "/", b"", "x"), address_from_url(URL), "t"
    )


@pytest.mark.parametrize(
    "data",
    [
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/1.1 abc\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: -5\r\n\r\n",
        b"x" * 100_000,
    ],
)
def test_an_answer_of_something_else_is_one_clear_error(data: bytes) -> None:
    with pytest.raises(BrokerUnavailable, match="does not answer as Pub/Sub does"):
        AnswerReader().feed(data)


def test_a_refusal_says_what_to_do_and_which_acknowledgements_came_too_late() -> None:
    address = address_from_url(URL)
    late = (
        b'{"error":{"message":"some failed","details":[{"metadata":{"a":'
        b'"PERMANENT_FAILURE_INVALID_ACK_ID","b":"TRANSIENT_FAILURE_X","c":"other"}}]}}'
    )
    found = error_of(Answer(400, late, True), address, "acknowledging")
    assert isinstance(found, AcksRefused)
    assert (set(found.late), set(found.again)) == ({"a"}, {"b"})
    assert isinstance(error_of(Answer(404, b"{}", True), address, "x"), NotFound)
    assert isinstance(error_of(Answer(429, b"{}", True), address, "x"), BrokerUnavailable)
    assert isinstance(error_of(Answer(503, b"no json", True), address, "x"), BrokerUnavailable)
    refused = error_of(Answer(403, b"{}", True), address, "publishing")
    assert isinstance(refused, AccessRefused) and "roles/pubsub.editor" in str(refused)


def test_celerys_options_of_this_transport_have_a_verdict_each() -> None:
    options = {"queue_name_prefix": "x-", "enable_exactly_once_delivery": True, "ack_deadline_seconds": 60}
    judged = judge_options(URL, options)
    assert changes_of(judged) == {"queue_name_prefix": "x-", "exactly_once": True}
    assert judged[2].support is Support.NO_EFFECT
