"""What RabbitMQ means when it closes a channel or a connection, in its own words (3.10 to 4.1)."""

import pytest

from umbel.brokers.amqp.handshake import (
    BrokerStarting,
    ChannelClosed,
    Location,
    channel_refusal,
    connection_refusal,
)
from umbel.errors import BrokerUnavailable

HERE = Location("localhost", 5672, "/", "guest", "secret", tls=False)
QUEUE = "queue 'umbel.facts' in vhost '/'"


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (404, f"NOT_FOUND - home node 'rabbit@h' of durable {QUEUE} is down or inaccessible"),
        (404, f"NOT_FOUND - failed to perform operation on {QUEUE} due to timeout"),
        (406, f"PRECONDITION_FAILED - queue '{QUEUE}' does not a have a replica on the local node"),
        (406, f"PRECONDITION_FAILED - queue '{QUEUE}' does not have a replica on the local node"),
        (406, f"PRECONDITION_FAILED - stream {QUEUE} does not have a running replica on the local node"),
        (404, f"NOT_FOUND - {QUEUE} process is stopped by supervisor"),
        (541, f"INTERNAL_ERROR - {QUEUE} timeout occurred during consume operation"),
        (541, f"INTERNAL_ERROR - Stream coordinator unavailable for {QUEUE}"),
        (541, "INTERNAL_ERROR - Cannot declare a queue 'q' on node 'rabbit@h': {error,timeout}"),
        (506, "RESOURCE_ERROR - failed to start"),
    ],
)
def test_what_is_not_there_yet_is_a_server_that_starts(code: int, text: str) -> None:
    error = channel_refusal(HERE, code, text)
    assert isinstance(error, BrokerStarting) and isinstance(error, BrokerUnavailable)
    assert text in str(error) and "secret" not in str(error)


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (404, f"NOT_FOUND - no {QUEUE}"),
        (404, f"NOT_FOUND - {QUEUE} has crashed and failed to restart"),
        (405, f"RESOURCE_LOCKED - cannot obtain exclusive access to locked {QUEUE}"),
        (406, f"PRECONDITION_FAILED - inequivalent arg 'durable' for {QUEUE}"),
        (406, "PRECONDITION_FAILED - delivery acknowledgement on channel 1 timed out. Timeout value used: 1"),
    ],
)
def test_a_no_stays_a_no(code: int, text: str) -> None:
    error = channel_refusal(HERE, code, text)
    assert isinstance(error, ChannelClosed) and (error.code, error.text) == (code, text)


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (530, "NOT_ALLOWED - access to vhost '/' refused for user 'guest': vhost '/' is down"),
        (320, "CONNECTION_FORCED - broker forced connection closure with reason 'shutdown'"),
        (541, "INTERNAL_ERROR"),
    ],
)
def test_a_server_that_starts_or_stops_may_be_asked_again(code: int, text: str) -> None:
    assert isinstance(connection_refusal(HERE, code, text), BrokerStarting)


@pytest.mark.parametrize(
    ("code", "text", "remedy"),
    [
        (403, "ACCESS_REFUSED - Login was refused using authentication mechanism PLAIN", "user and password"),
        (530, "NOT_ALLOWED - vhost nowhere not found", "rabbitmqctl add_vhost"),
        (530, "NOT_ALLOWED - access to vhost '/' refused for user 'guest'", "set_permissions"),
        (540, "NOT_IMPLEMENTED - queue 'q' does not support global qos", "global qos"),
    ],
)
def test_what_waiting_does_not_mend_says_what_to_do(code: int, text: str, remedy: str) -> None:
    error = connection_refusal(HERE, code, text)
    assert not isinstance(error, BrokerStarting) and remedy in str(error)
