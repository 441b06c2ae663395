"""`umbel health`: check whether this project's workers on this machine are healthy.

Probes of containers call it often, so it needs neither the app nor the broker: it reads only the state files
that the workers write.
"""

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
from umbel.cli.options import broker_option, json_option, phase_text, run_directory_option, say
from umbel.text import without_password
from umbel.worker.run_directory import NodeState, default_run_directory, forget_dead, read_states

REPLACED_SHOWN_S = 3600.0
_RELATIVE = re.compile("sqlite:///(?!/)")  # a path that is relative to the project's folder


@click.command("health")
@broker_option
@click.option("-n", "--hostname", metavar="NAME[@HOST]", help="Only this node.")
@click.option(
    "--live",
    "probe",
    flag_value="live",
    help="Check only liveness: the process exists and its event loop responds.",
)
@click.option(
    "--ready",
    "probe",
    flag_value="ready",
    help="Check only readiness: the worker takes tasks and is not stopping.",
)
@click.option(
    "--all", "everyone", is_flag=True, help="Check the workers of all projects of this user on this machine."
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

    The project's workers are those with the broker of -b or UMBEL_BROKER; without these, those that were
    started in this folder.

    A worker that cannot reach its broker is live, but neither healthy nor ready: a restart would not help. A
    worker that is stopping is healthy and live, but not ready. Exit code: 0 if all workers pass, 1 if one
    does not, 3 if there is no worker.
    """
    directory, is_named = run_directory or default_run_directory(), run_directory is not None
    belongs = (lambda _: True) if everyone else ours(url)
    if forget:
        forgotten = forget_dead(directory, belongs, of_any_user=is_named)
        click.echo(f"umbel: {forgotten} state files removed", err=True)
    states = read_states(directory, of_any_user=is_named)
    found = [state for state in states if hostname is None or _is(state, hostname)]
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
    """Return a filter for the workers of this project.

    A broker address from -b or the environment decides, because it overrides the app's settings. Without it,
    only the app knows its broker. The app is not loaded here, so a worker belongs to the project if it was
    started in this folder.
    """
    broker = without_password(url or os.environ.get("UMBEL_BROKER", ""))
    home = _project_of(Path.cwd())

    def belongs(state: NodeState) -> bool:
        if "broker" not in state.fields or state.fields["broker"] == broker:
            return True
        is_decisive = broker and not _RELATIVE.match(broker)
        return not is_decisive and Path(state.fields.get("directory", "/")).is_relative_to(home)

    return belongs


def _project_of(folder: Path) -> Path:
    """Return the nearest parent folder whose pyproject.toml has [tool.umbel]; else the folder itself."""
    for parent in (folder, *folder.parents):
        with suppress(OSError):
            if "[tool.umbel]" in (parent / "pyproject.toml").read_text(errors="replace"):
                return parent
    return folder


def _as_data(state: NodeState) -> dict[str, Any]:
    """Return the state of a worker for --json."""
    verdict = {"healthy": state.healthy, "live": state.live, "ready": state.ready, "problem": state.problem}
    return {**state.fields, "node": state.node, **verdict}


def _passes(state: NodeState, probe: str | None) -> bool:
    """Return whether a worker passes the probe; without a probe, whether it is healthy."""
    return state.live if probe == "live" else state.ready if probe == "ready" else state.healthy


def _is(state: NodeState, name: str) -> bool:
    """Return whether a worker has this name, with or without its host."""
    return state.node == name or state.node.partition("@")[0] == name


def _line(state: NodeState, probe: str | None) -> str:
    """Describe a worker in a line. The wording follows the chosen probe, so that it agrees with the exit
    code.
    """
    asked = probe or "healthy"
    if not _passes(state, probe):
        refused = f"not {probe}" if probe else "unhealthy"
        return f"{state.node}: {refused}: {state.problem or _why_not_ready(state)}"
    problem = f"; {state.problem}" if state.problem else ""
    processed = state.fields.get("counters", {}).get("processed", 0)
    return f"{state.node}: {asked}, {_doing(state)}, {processed} processed{problem}{_replaced(state)}"


def _why_not_ready(state: NodeState) -> str:
    """Return the reason why a live worker is not ready."""
    stopping = state.fields.get("stopping", {}).get("phase") not in (None, "running")
    return _doing(state) if stopping else "it consumes no queue"


def _doing(state: NodeState) -> str:
    """Describe how many tasks a worker runs, and its shutdown phase."""
    running = len(state.fields.get("pool", {}).get("running", ()))
    stopping = state.fields.get("stopping", {})
    if stopping.get("phase") in (None, "running"):
        return f"{running} running"
    from umbel.wire.control import Stopping, typed

    return phase_text(typed(stopping, Stopping))


def _replaced(state: NodeState) -> str:
    """Describe a recent replacement of the broker's data, which explains unknown messages."""
    replaced = state.fields.get("store_replaced")
    if not replaced or time.time() - replaced["at"] >= REPLACED_SHOWN_S:
        return ""
    ago_s, unknown = time.time() - replaced["at"], replaced["unknown"]
    return f"; the broker's data was replaced {ago_s:.0f} s ago, {unknown} claimed messages unknown to it"
