"""`umbel mark`: a moment that people care about, on the charts and in the history: a deploy."""

import click

from umbel.brokers.interface import Broker
from umbel.cli import exits
from umbel.cli.broker import ask_broker
from umbel.cli.options import app_option, broker_option
from umbel.protocol.clock import LamportClock
from umbel.web.telling import MARK, Teller

TEXT_MAX = 200


@click.command("mark")
@app_option
@broker_option
@click.argument("text")
def command(app_name: str | None, url: str | None, text: str) -> int:
    """Set a mark TEXT, as in `umbel mark "v1.4"`: running dashboards show it on their charts."""
    if not 0 < len(text.strip()) <= TEXT_MAX:
        raise click.UsageError(f"TEXT must have 1 to {TEXT_MAX} characters, not {len(text.strip())}")

    async def tell(broker: Broker) -> None:
        clock = LamportClock(await broker.coordination.raise_clock(0))
        await Teller(broker, clock, "mark").tell(MARK, {"text": text.strip()})

    ask_broker(app_name, tell, url=url)
    return exits.OK
