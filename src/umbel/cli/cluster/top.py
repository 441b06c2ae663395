"""`umbel top`: the cluster in the terminal: members, queues, tasks in their order, one task's story."""

import click

from umbel.brokers.interface import Broker
from umbel.cli import exits
from umbel.cli.broker import ask_broker
from umbel.cli.options import app_option, broker_option
from umbel.monitor.feed import Feed
from umbel.urls import without_password


@click.command("top")
@app_option
@broker_option
@click.option("--no-enable", is_flag=True, help="Do not ask workers to send task events.")
def command(app_name: str | None, url: str | None, no_enable: bool) -> int:
    """Watch the cluster in the terminal; the keys are shown below.

    Asks the workers to send task events, as `umbel events -E` does.
    """
    try:
        from umbel.top.screen import Top
    except ModuleNotFoundError as error:
        if error.name != "textual":
            raise
        raise click.ClickException("umbel top needs textual: pip install 'umbel[top]'") from None

    async def watch(broker: Broker) -> None:
        feed = Feed(broker, enable=not no_enable)
        await Top(feed, without_password(broker.url)).run_async()

    ask_broker(app_name, watch, url=url)
    return exits.OK
