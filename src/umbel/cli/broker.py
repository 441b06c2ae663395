"""Access to the cluster for commands: call the broker, and find the known remote commands."""

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

# ---- calling the broker ----------------------------------------------------------------------------

T = TypeVar("T")
SLACK_S, SLACK = (
    0.05,
    0.05,
)  # seconds, and a share of the limit; on a busy machine an inner time limit expires a little late


def ask_broker(
    app_name: str | None, question: Callable[[Broker], Awaitable[T]], *, url: str | None = None
) -> T:
    """Open a broker, run `question` on it, and close it. Without `url`, this is the app's broker."""

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
    """Like `ask_broker`, with time limits: `timeout_s` to connect, and twice that for `question`. Raise
    BrokerUnavailable if a limit is exceeded.
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
    """Run one step with a time limit. Most steps have a slightly shorter limit; this one catches those
    without.
    """
    limit = asyncio.timeout(limit_s + SLACK_S + SLACK * limit_s)
    try:
        async with limit:
            return await work
    except TimeoutError:
        if not limit.expired():  # raised by the work itself
            raise
        raise BrokerUnavailable(f"the broker did not answer {what} within {limit_s:g} s") from None


async def _close(broker: BrokerConnection, limit_s: float) -> None:
    """Close the connection; skip the closing handshake if the broker does not answer."""
    with suppress(TimeoutError):
        async with asyncio.timeout(limit_s):
            await broker.close()


def _at(url: str) -> BrokerSettings:
    """Return broker settings without an app; the other settings come from the environment or
    pyproject.toml.
    """
    settings = assemble({})
    return BrokerSettings(
        url,
        revokes_max=settings.revokes_max,
        revoke_retention_s=settings.revoke_retention_s,
        keyring=settings.keyring,
        signing_cluster=settings.signing_cluster,
    )


# ---- remote commands -------------------------------------------------------------------------------


def known_commands(app_name: str | None) -> Panel:
    """Return the remote commands that are available; without an app, the built-in ones. Raise AppNotFound if
    `app_name` is given and cannot be found.
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
