"""What the transport options of a Celery project mean: mapped, without effect, or refused by name."""

import ssl
from typing import Any

import pytest
from msgspec.structs import replace

from umbel.brokers.amqp.handshake import locations_from_url
from umbel.brokers.interface import BrokerSettings
from umbel.brokers.options import (
    Support,
    changes_of,
    judge_options,
    judge_result_options,
    with_sentinel,
    with_tls,
)
from umbel.brokers.redis.address import parse_address, parse_addresses
from umbel.errors import NotSupported

REDIS, AMQP = "redis://localhost", "amqp://localhost"


def verdicts(url: str, **options: Any) -> dict[str, Support]:
    return {one.name: one.support for one in judge_options(url, options)}


def test_options_of_redis_become_settings() -> None:
    options = {"global_keyprefix": "shop:", "priority_steps": [0, 5], "sep": ":", "fanout_prefix": False,
               "socket_connect_timeout": 2, "visibility_timeout": 43_200, "client_name": None}  # fmt: skip
    changed = replace(BrokerSettings(REDIS), **changes_of(judge_options(REDIS, options)))
    assert changed == BrokerSettings(
        REDIS, key_prefix="shop:", priority_steps=(0, 5), sep=":", fanout_prefix="", connect_timeout_s=2.0
    )
    assert changes_of(judge_options(REDIS, {"fanout_prefix": True})) == {"fanout_prefix": "/{db}."}
    assert changes_of(judge_options(REDIS, {"fanout_prefix": "/x."})) == {"fanout_prefix": "/x."}


@pytest.mark.parametrize(
    ("given", "prefix"), [("shop", "shop_"), ("shop:", "shop:"), ("shop-", "shop-"), ("", "")]
)
def test_the_prefix_of_results_ends_as_celery_ends_it(given: str, prefix: str) -> None:
    assert changes_of(judge_result_options({"global_keyprefix": given})) == {"result_key_prefix": prefix}


def test_what_has_no_effect_says_why() -> None:
    for url in (REDIS, AMQP):
        for one in judge_options(url, {"visibility_timeout": 5, "queue_order_strategy": "priority"}):
            assert one.support is Support.NO_EFFECT
            assert one.why


def test_what_is_not_supported_is_refused_by_name() -> None:
    options = {"sentinels": [], "sentinel_kwargs": {"ssl": True}, "made_up": 1, "fanout_patterns": False}
    with pytest.raises(NotSupported) as refused:
        changes_of(judge_options(REDIS, options))
    for name in options:
        assert repr(name) in str(refused.value)
    assert verdicts(AMQP, login_method="EXTERNAL", on_blocked=print, confirm_publish=True) == {
        "login_method": Support.UNSUPPORTED,
        "on_blocked": Support.UNSUPPORTED,
        "confirm_publish": Support.NO_EFFECT,
    }


def test_what_options_say_of_sentinels_becomes_a_part_of_their_address() -> None:
    options = {"master_name": "orders", "sentinel_kwargs": {"password": "a&b"}}
    url = with_sentinel("sentinel://one:26379/1; sentinel://:pw@two/1", options)
    first, second = parse_addresses(url)
    assert (first.host, first.port, first.database, first.master) == ("one", 26379, 1, "orders")
    assert (second.host, second.port, second.password, second.master) == ("two", 26379, "pw", "orders")
    assert first.sentinel_login == second.sentinel_login == ("", "a&b")
    assert {one.support for one in judge_options(url, options)} == {Support.MAPPED}
    assert with_sentinel(REDIS, options) == REDIS
    assert parse_address(with_tls("sentinel://one?master_name=m", True)).tls


@pytest.mark.parametrize("reqs", [ssl.CERT_NONE, "none", "CERT_NONE", 0])
def test_settings_for_tls_go_into_the_address(reqs: Any) -> None:
    on_redis = with_tls("redis://:pw@host:6380/1", {"ssl_cert_reqs": reqs, "ssl_ca_certs": "/ca x.pem"})
    address = parse_address(on_redis)
    assert (address.tls, address.port, address.database, address.password) == (True, 6380, 1, "pw")
    assert dict(address.tls_options) == {"ssl_cert_reqs": "none", "ssl_ca_certs": "/ca x.pem"}
    (on_amqp,) = locations_from_url(with_tls("amqp://host/shop", {"certfile": "c", "keyfile": "k"}))
    assert (on_amqp.tls, on_amqp.port, on_amqp.vhost) == (True, 5671, "shop")
    assert dict(on_amqp.tls_options) == {"ssl_certfile": "c", "ssl_keyfile": "k"}


def test_tls_as_it_stands_and_what_it_cannot_do() -> None:
    assert with_tls("redis://a;redis://b", use_ssl=True) == "rediss://a;rediss://b"
    assert with_tls("amqps://a", use_ssl=True) == "amqps://a"
    assert with_tls("amqp://a", None) == "amqp://a"
    with pytest.raises(NotSupported, match="'ciphers'"):
        with_tls("amqp://a", {"ciphers": "x"})
    with pytest.raises(NotSupported, match="CERT_REQUIRED or CERT_NONE"):
        with_tls("redis://a", {"ssl_cert_reqs": ssl.CERT_OPTIONAL})
