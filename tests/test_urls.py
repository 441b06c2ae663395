import pytest
from hypothesis import given
from hypothesis import strategies as st

from umbel.brokers.interface import BrokerSettings
from umbel.brokers.registry import open_producer
from umbel.errors import BadURL
from umbel.text import without_password
from umbel.worker.remote.view import broker_map


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://:a@h/0;redis://u:b@h/1", "redis://:***@h/0;redis://u:***@h/1"),
        ("amqp://u:p@ss;word@h//", "amqp://u:***@h//"),
        ("amqp://u@h//", "amqp://u@h//"),
        ("sqlite:///umbel.db", "sqlite:///umbel.db"),
        ("no address", "no address"),
        ("redis:/u:p@h", "redis:***@h"),
        ("redis//:p@h", "redis//:***@h"),
        ("u:p@h/0", "u:***@h/0"),
        (
            "postgresql:///d?host=/run/pg&user=u&password=p",
            "postgresql:///d?host=/run/pg&user=u&password=***",
        ),
        ("postgresql://u:p@h/d?sslpassword=p&x=1", "postgresql://u:***@h/d?sslpassword=***"),
        ("postgresql://h:1/d?pass%77ord=a@b", "postgresql://h:***"),
        ("postgresql://u@h/d?password=a@b", "postgresql://u@h/d?password=***"),
        ("host=h password=p user=u", "host=h password=***"),
    ],
)
def test_an_address_is_shown_without_its_passwords(url: str, shown: str) -> None:
    assert without_password(url) == shown


@given(st.text(min_size=1).filter(lambda secret: "://" not in secret))
def test_no_character_of_a_password_makes_it_visible(secret: str) -> None:
    marked = f"MARK{secret}MARK"
    assert "MARK" not in without_password(f"redis://ada:{marked}@host/0")
    assert "MARK" not in str(BadURL(f"redis://ada:{marked}@host/0", "it is wrong"))


@given(st.text(min_size=1).filter(lambda secret: "://" not in secret))
def test_nor_does_one_of_a_parameter(secret: str) -> None:
    marked = f"MARK{secret}MARK"
    assert "MARK" not in without_password(f"postgresql:///shop?user=ada&password={marked}")
    assert "MARK" not in without_password(f"postgresql://host:5432/shop?password={marked}")


def test_stats_show_the_first_address_and_the_others_without_passwords() -> None:
    shown = broker_map("amqp://u:p1@h1:5673//;amqp://u:p2@h2//")
    assert (shown["hostname"], shown["port"], shown["virtual_host"]) == ("h1", 5673, "/")
    assert shown["alternates"] == ["amqp://u:***@h2//"]


@pytest.mark.parametrize("scheme", ["amqp", "redis"])
def test_several_hosts_in_one_address_are_told_how_to_be_written(scheme: str) -> None:
    with pytest.raises(BadURL, match="hosts joined by ','; write an address for each, joined by ';'"):
        open_producer(BrokerSettings(f"{scheme}://user:a,b@one:1000,two:2000/"))
