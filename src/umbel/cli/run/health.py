"""`umbel health`: are this project's workers on this machine healthy? For probes: no app, no broker."""

import json
import os
import re
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from umbel.cli import exits
from umbel.cli.options import broker_option, json_option, run_directory_option
from umbel.cli.show.phases import phase_text
from umbel.cli.show.printing import say
from umbel.urls import without_password
from umbel.worker.process.run_directory import NodeState, default_run_directory, forget_dead, read_states

REPLACED_SHOWN_S = 3600.0
_RELATIVE = re.compile("sqlite:///(?!/)")  # lies in the project, wherever that is


@click.command("health")
@broker_option
@click.option("-n", "--hostname", metavar="NAME[@HOST]", help="Only this node.")
@click.option(
    "--live",
    "probe",
    flag_value="live",
    help="Only liveness: the process exists and its event loop responds.",
)
@click.option(
    "--ready", "probe", flag_value="ready", help="Only readiness: the worker takes tasks and is not stopping."
)
@click.option(
    "--all", "everyone", is_flag=True, help="The workers of all projects of this user on this machine."
)
@click.option("--forget", is_flag=True, help="Remove the state files of workers that died.")
@run_directory_option
@json_option
def command(
    url: str | None,
    hostname: str | None,
    run_directory: Path | None,
    probe: str | None,
    everyone: bool,
    forget: bool,
    as_json: bool,
) -> int:
    """Check whether this project's workers on this machine are healthy, live or ready.

    A project's workers have the broker that -b or UMBEL_BROKER names; without these, they were started in
    this folder.

    A worker that cannot reach its broker is live, but neither healthy nor ready: a restart would not
    help. One that is stopping is healthy and live, but not ready. Exit code: 0 all are, 1 one is not, 3 there
    is none.
    """
    directory = run_directory or default_run_directory()
    belongs = (lambda _: True) if everyone else ours(url)
    if forget:
        click.echo(f"umbel: {forget_dead(directory, belongs)} forgotten", err=True)
    found = [state for state in read_states(directory) if hostname is None or _is(state, hostname)]
    states = [state for state in found if belongs(state)]
    if as_json:
        click.echo(json.dumps([_as_data(state) for state in states], indent=2))
    for state in states if not as_json else ():
        say(_line(state, probe))
    if not states:
        wanted = f"named {hostname!r} " if hostname else ""
        others = f"; {len(found)} of other projects have one (--all shows them)" if found else ""
        click.echo(f"umbel: no worker {wanted}has a state file in {directory}{others}", err=True)
        return exits.NOT_FOUND
    return exits.OK if all(_passes(state, probe) for state in states) else exits.FAILED


def ours(url: str | None) -> Callable[[NodeState], bool]:
    """Whether a worker is one of this project's.

    An address that was given, or is in the environment, decides: it beats what the code says. Else only
    the app knows its broker, which is not loaded here, so a worker that was started in this folder counts.
    """
    broker = without_password(url or os.environ.get("UMBEL_BROKER", ""))
    home = _project_of(Path.cwd())

    def belongs(state: NodeState) -> bool:
        if "broker" not in state.fields or state.fields["broker"] == broker:
            return True
        is_told = broker and not _RELATIVE.match(broker)
        return not is_told and Path(state.fields.get("directory", "/")).is_relative_to(home)

    return belongs


def _project_of(folder: Path) -> Path:
    """The folder whose pyproject.toml has settings of ours, this one or one above; else this one."""
    for one in (folder, *folder.parents):
        with suppress(OSError):
            if "[tool.umbel]" in (one / "pyproject.toml").read_text(errors="replace"):
                return one
    return folder


def _as_data(state: NodeState) -> dict[str, Any]:
    said = {"healthy": state.healthy, "live": state.live, "ready": state.ready, "problem": state.problem}
    return {**state.fields, "node": state.node, **said}


def _passes(state: NodeState, probe: str | None) -> bool:
    return state.live if probe == "live" else state.ready if probe == "ready" else state.healthy


def _is(state: NodeState, name: str) -> bool:
    return state.node == name or state.node.partition("@")[0] == name


def _line(state: NodeState, probe: str | None) -> str:
    """In the words of what was asked, so that they say the same as the exit code."""
    asked = probe or "healthy"
    if not _passes(state, probe):
        refused = f"not {probe}" if probe else "unhealthy"
        return f"{state.node}: {refused}: {state.problem or _why_not_ready(state)}"
    problem = f"; {state.problem}" if state.problem else ""
    processed = state.fields.get("counters", {}).get("processed", 0)
    return f"{state.node}: {asked}, {_doing(state)}, {processed} processed{problem}{_replaced(state)}"


def _why_not_ready(state: NodeState) -> str:
    stopping = state.fields.get("stopping", {}).get("phase") not in (None, "running")
    return _doing(state) if stopping else "it consumes no queue"


def _doing(state: NodeState) -> str:
    running = len(state.fields.get("pool", {}).get("running", ()))
    stopping = state.fields.get("stopping", {})
    return phase_text(stopping) if stopping.get("phase") not in (None, "running") else f"{running} running"


def _replaced(state: NodeState) -> str:
    replaced = state.fields.get("store_replaced")
    if not replaced or time.time() - replaced["at"] >= REPLACED_SHOWN_S:
        return ""
    ago_s, unknown = time.time() - replaced["at"], replaced["unknown"]
    return f"; the broker's data was replaced {ago_s:.0f} s ago, {unknown} claimed messages unknown to it"
