"""Sentinel: where the primary is now, asked of a sentinel each time a connection is made.

The answer may be out of date: until the sentinels agree they name the server that is gone, and one that
was cut off names the primary of before. So a server that was found this way must say that it is one
(`check_greeting`).
"""

from dataclasses import replace
from typing import Any

from umbel.brokers.redis.address import Address
from umbel.brokers.redis.replies import checked, login
from umbel.errors import AccessRefused, BrokerUnavailable


def question(address: Address) -> list[tuple[Any, ...]]:
    """For the sentinel; the last reply is the answer."""
    asked = ("SENTINEL", "GET-MASTER-ADDR-BY-NAME", address.master)
    return [*login(*address.sentinel_login), asked]


def primary_from(replies: list[Any], address: Address) -> Address:
    """The server that the sentinel named."""
    try:
        named = checked(replies, address)[-1]
    except AccessRefused:
        raise AccessRefused(
            f"the sentinel at {address.host}:{address.port} refuses the login or the question; its user and "
            "password are sentinel_username and sentinel_password in the address"
        ) from None
    if not named:
        raise BrokerUnavailable(
            f"the sentinel at {address.host}:{address.port} knows no master called {address.master!r}; "
            "check master_name in the address"
        )
    host, port = named
    return replace(address, host=host.decode(), port=int(port), master="")
