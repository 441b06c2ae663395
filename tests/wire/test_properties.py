from umbel.wire.message import (
    OTHER_MAX_BYTES,
    Message,
    Outgoing,
    delivery_info_of,
    encode_others,
    others_of,
    properties_of,
)
from umbel.wire.retried import requeued

PLAIN = Message(b"{}", b"[]", correlation_id="i", reply_to="me", priority=3, expiration_ms=60_000)


def test_only_what_has_no_field_is_kept_apart() -> None:
    given = {"app_id": "shop", "priority": 3, "delivery_tag": "t", "type": None, "origin": {"a": [1]}}
    others = encode_others(given)
    assert others_of(Message(b"{}", b"", properties=others)) == {"app_id": "shop", "origin": {"a": [1]}}
    assert encode_others({"priority": 3}) == b""


def test_a_load_is_no_property() -> None:
    assert encode_others({"app_id": "x" * OTHER_MAX_BYTES}) == b""


def test_a_request_sees_all_of_them_under_the_names_of_amqp() -> None:
    message = Message(b"{}", b"[]", correlation_id="i", properties=encode_others({"app_id": "shop"}))
    assert properties_of(message) == {
        "content_type": "application/json",
        "content_encoding": "utf-8",
        "priority": 0,
        "delivery_mode": 2,
        "correlation_id": "i",
        "reply_to": "",
        "app_id": "shop",
    }
    assert properties_of(PLAIN)["expiration"] == "60000"


def test_how_a_message_came_is_said_as_celery_says_it() -> None:
    assert delivery_info_of(PLAIN, "celery", redelivered=True) == {
        "exchange": "",
        "routing_key": "celery",
        "priority": 3,
        "redelivered": True,
    }
    by_topic = Message(b"{}", b"", exchange="orders", routing_key="eu.new")
    info = delivery_info_of(by_topic, "eu", redelivered=False)
    assert (info["exchange"], info["routing_key"]) == ("orders", "eu.new")


def test_a_letter_for_an_exchange_goes_there_again() -> None:
    sent = Outgoing("", PLAIN, exchange="orders", routing_key="eu.new")
    assert sent.target == "orders/eu.new"
    letter = sent.as_letter()
    assert letter.queue == ""
    again = requeued(letter.queue, letter.message, starts=0, stored="", signer=None, now=0.0)
    assert (again.queue, again.exchange, again.routing_key) == ("", "orders", "eu.new")
    assert Outgoing("celery", PLAIN).as_letter() == Outgoing("celery", PLAIN)
