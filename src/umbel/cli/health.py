"""`umbel health`: are the workers on this machine well? For probes: no app, no broker, quick."""

import json
import time
from pathlib import Path

import click

from umbel.cli import exits
from umbel.cli.options import json_option, run_directory_option, say
from umbel.cli.phases import phase_text
from umbel.worker.run_directory import NodeState, default_run_directory, forget_dead, read_states

REPLACED_SHOWN_S = 3600.0


@click.command("health")
@click.option("-n", "--hostname", metavar="NAME[@HOST]", help="Only this node.")
@click.option("--live", "probe", flag_value="live", help="Only: its process is there and its loop turns.")
@click.option("--ready", "probe", flag_value="ready", help="Only: it takes tasks, and was not told to stop.")
@click.option("--forget", is_flag=True, help="Forget workers that are gone and did not say so.")
@run_directory_option
@json_option
def command(
    hostname: str | None, run_directory: Path | None, probe: str | None, forget: bool, as_json: bool
) -> int:
    """Say whether the workers on this machine are well, live or ready.

    A worker that cannot reach its broker is live, and neither well nor ready: starting it again would not
    help. One that is stopping is well and live, but not ready. Exit code: 0 all are, 1 one is not, 3 there
    is none.
    """
    directory = run_directory or default_run_directory()
    if forget:
        click.echo(f"umbel: {forget_dead(directory)} forgotten", err=True)
    states = [state for state in read_states(directory) if hostname is None or _is(state, hostname)]
    if as_json:
        rows = [
            {
                **state.fields,
                "node": state.node,
                "healthy": state.healthy,
                "live": state.live,
                "ready": state.ready,
                "problem": state.problem,
            }
            for state in states
        ]
        click.echo(json.dumps(rows, indent=2))
    for state in states if not as_json else ():
        say(_line(state))
    if not states:
        wanted = f"named {hostname!r} " if hostname else ""
        click.echo(f"umbel: no worker {wanted}has left word in {directory}", err=True)
        return exits.NOT_FOUND
    return exits.OK if all(_passes(state, probe) for state in states) else exits.FAILED


def _passes(state: NodeState, probe: str | None) -> bool:
    return state.live if probe == "live" else state.ready if probe == "ready" else state.healthy


def _is(state: NodeState, name: str) -> bool:
    return state.node == name or state.node.partition("@")[0] == name


def _line(state: NodeState) -> str:
    if not state.healthy:
        return f"{state.node}: NOT WELL: {state.problem}"
    counters = state.fields.get("counters", {})
    running = len(state.fields.get("pool", {}).get("running", ()))
    stopping = state.fields.get("stopping", {})
    doing = phase_text(stopping) if stopping.get("phase") not in (None, "running") else f"{running} running"
    line = f"{state.node}: well, {doing}, {counters.get('processed', 0)} processed"
    replaced = state.fields.get("store_replaced")
    if replaced and time.time() - replaced["at"] < REPLACED_SHOWN_S:
        ago_s, unknown = time.time() - replaced["at"], replaced["unknown"]
        line += (
            f"; the broker's data was replaced {ago_s:.0f} s ago, {unknown} claimed messages unknown to it"
        )
    return line
