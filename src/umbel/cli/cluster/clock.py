"""`umbel clock`: the logical time of the cluster, and that of each node."""

import click

from umbel.cli import exits
from umbel.cli.broker import ClusterBroker, ask_in_time
from umbel.cli.options import app_option, broker_option, json_option
from umbel.cli.show.printing import print_json, print_table
from umbel.control.client import Asker


@click.command("clock")
@app_option
@broker_option
@click.option("--timeout", "timeout_s", type=float, default=1.0, show_default=True, help="Seconds to wait.")
@json_option
def command(app_name: str | None, url: str | None, timeout_s: float, as_json: bool) -> int:
    """Show the cluster's clock mark, from which nodes start, and each node's Lamport clock."""

    async def ask(broker: ClusterBroker, left_s: float) -> tuple[int, dict[str, int]]:
        answers = await Asker(broker).ask("clock", timeout_s=left_s)
        clocks = {
            node: said["clock"]
            for node, said in answers.replies.items()
            if isinstance(said, dict) and isinstance(said.get("clock"), int)
        }
        return await broker.coordination.raise_clock(0), clocks

    mark, clocks = ask_in_time(app_name, ask, timeout_s, url=url)
    if as_json:
        print_json({"mark": mark, "nodes": clocks})
    else:
        print_table(("node", "clock"), [("(mark)", mark), *sorted(clocks.items())])
    return exits.OK
