"""`umbel health`: are the workers on this machine well? For probes: no app, no broker, quick."""

import json
from pathlib import Path

import click

from umbel.cli import exits
from umbel.cli.options import json_option, run_directory_option
from umbel.worker.run_directory import NodeState, default_run_directory, forget_dead, read_states


@click.command("health")
@click.option("-n", "--hostname", metavar="NAME[@HOST]", help="Only this node.")
@click.option("--forget", is_flag=True, help="Forget workers that are gone and did not say so.")
@run_directory_option
@json_option
def command(hostname: str | None, run_directory: Path | None, forget: bool, as_json: bool) -> int:
    """Say whether the workers on this machine are well.

    Exit code: 0 all are, 1 one is not, 3 there is none.
    """
    directory = run_directory or default_run_directory()
    if forget:
        click.echo(f"umbel: {forget_dead(directory)} forgotten", err=True)
    states = [state for state in read_states(directory) if hostname is None or _is(state, hostname)]
    if as_json:
        rows = [
            {**state.fields, "node": state.node, "healthy": state.healthy, "problem": state.problem}
            for state in states
        ]
        click.echo(json.dumps(rows, indent=2))
    for state in states if not as_json else ():
        click.echo(_line(state))
    if not states:
        wanted = f"named {hostname!r} " if hostname else ""
        click.echo(f"umbel: no worker {wanted}has left word in {directory}", err=True)
        return exits.NOT_FOUND
    return exits.OK if all(state.healthy for state in states) else exits.FAILED


def _is(state: NodeState, name: str) -> bool:
    return state.node == name or state.node.partition("@")[0] == name


def _line(state: NodeState) -> str:
    if not state.healthy:
        return f"{state.node}: NOT WELL: {state.problem}"
    counters = state.fields.get("counters", {})
    running = len(state.fields.get("pool", {}).get("running", ()))
    return f"{state.node}: well, {running} running, {counters.get('processed', 0)} processed"
