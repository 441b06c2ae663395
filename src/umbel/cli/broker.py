"""How a command reaches the cluster: it opens the broker, asks, and closes it; and which remote commands
there are.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TypeVar

from msgspec.structs import replace

from umbel.app.settings import assemble
from umbel.brokers.interface import Broker, BrokerConnection, BrokerSettings
from umbel.brokers.registry import open_broker
from umbel.control.commands import builtin_panel
from umbel.control.panel import Panel
from umbel.errors import AppNotFound, BrokerUnavailable
from umbel.launch.loading import find_app
from umbel.protocol.pidbox import ANSWERS_S

# ---- how a command talks to the broker -------------------------------------------------------------
#
# Open it, ask, close it.

T = TypeVar("T")
SLACK_S, SLACK = (
    0.05,
    0.05,
)  # seconds, and a share of the limit: on a busy machine the inner time limit ends a little late


def ask_broker(
    app_name: str | None, question: Callable[[Broker], Awaitable[T]], *, url: str | None = None
) -> T:
    """Open the broker at the address, run the question on it, and close it. Without an address, the app's
    broker.
    """

    settings = _at(url) if url else find_app(app_name).app.broker_settings()

    async def ask() -> T:
        broker = open_broker(settings)
        try:
            await broker.open()
            return await question(broker)
        finally:
            await broker.close()

    return asyncio.run(ask())


def ask_in_time(
    app_name: str | None,
    question: Callable[[Broker], Awaitable[T]],
    timeout_s: float | None,
    *,
    url: str | None = None,
) -> T:
    """Like `ask_broker`, with limits: `timeout_s` to connect, twice as much to send and get replies.

    Raises BrokerUnavailable when a limit is exceeded.
    """

    settings = _at(url) if url else find_app(app_name).app.broker_settings()

    most_s = ANSWERS_S if timeout_s is None else timeout_s

    async def ask() -> T:
        broker = open_broker(replace(settings, connect_timeout_s=most_s))
        close_s = SLACK_S
        try:
            await _within(most_s, broker.open(), "to the connection")
            answer = await _within(2 * most_s, question(broker), "to the question")
            close_s = most_s
            return answer
        finally:
            await _close(broker, close_s)

    return asyncio.run(ask())


async def _within(limit_s: float, work: Awaitable[T], what: str) -> T:
    """Run one step. Its own time limit is a little shorter; this one catches steps without a limit."""
    limit = asyncio.timeout(limit_s + SLACK_S + SLACK * limit_s)
    try:
        async with limit:
            return await work
    except TimeoutError:
        if not limit.expired():  # raised by the work itself
            raise
        raise BrokerUnavailable(f"the broker did not answer {what} within {limit_s:g} s") from None


async def _close(broker: BrokerConnection, limit_s: float) -> None:
    """Skip the closing handshake with a broker that is silent."""
    with suppress(TimeoutError):
        async with asyncio.timeout(limit_s):
            await broker.close()


def _at(url: str) -> BrokerSettings:
    """Settings of a broker without an app; the rest comes from the environment or the project."""
    settings = assemble({})
    return BrokerSettings(
        url,
        revokes_max=settings.revokes_max,
        revoke_retention_s=settings.revoke_retention_s,
        keyring=settings.keyring,
        signing_cluster=settings.signing_cluster,
    )


# ---- the remote commands ---------------------------------------------------------------------------
#
# The built-in ones, and those of the app.


def known_commands(app_name: str | None) -> Panel:
    """The remote commands that a command line can use; without an app the built-in ones. Raises AppNotFound
    for an app that was named.
    """
    panel = builtin_panel()
    try:
        found = find_app(app_name)
        users = found.project.control_commands() if found.project else found.app.panel
        panel.include(users)
    except AppNotFound:
        if app_name is not None:
            raise
    return panel
