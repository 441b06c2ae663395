"""`umbel worker`: run a worker until it is stopped.

The options of `celery worker` have the same names here. Each has an effect, or a log line explains why it
has none.

The fork server and every child process also contain the imports of this module. Imports that only the main
process needs are therefore in `running_worker.py`.
"""

import gc
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click

from umbel.app.settings import Settings, override
from umbel.cli import completion, exits
from umbel.cli.options import (
    app_option,
    json_option,
    level_of,
    log_options,
    other_broker_option,
    run_directory_option,
    use_broker,
)
from umbel.cli.run.web_options import require_web
from umbel.launch.loading import find_app
from umbel.launch.preparation import ChildLogs, node_name, refuse_few_descriptors, started_early
from umbel.logs import log_path, set_up_logging
from umbel.pools.prefork.server_process import ForkPoint
from umbel.worker.daemon import (
    detach,
    log_own_stacks_on_signal,
    pid_file,
    refuse_if_running,
    refuse_unwritable,
    switch_user,
)
from umbel.worker.run_directory import default_run_directory

# ---- celery options --------------------------------------------------------------------------------

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])
log = logging.getLogger("umbel.worker")

_CLAIMED = "messages are claimed as child processes become free"
# Options without effect: the spelling, and the reason why Umbel does not need it.
NOTES: Mapping[str, tuple[str, str]] = {
    "beat": ("-B", "every worker can send the schedule, and the holder of a lease does"),
    "optimization": ("-O", "messages always go to a free child process, as with -O fair"),
    "prefetch_multiplier": ("--prefetch-multiplier", _CLAIMED),
    "disable_prefetch": ("--disable-prefetch", _CLAIMED),
    "statedb": ("-S", "the broker stores revoked tasks, and the run directory stores clocks"),
    "schedule_filename": ("-s", "the broker stores when periodic tasks ran"),
    "scheduler": ("--scheduler", "the app's setting beat_scheduler selects it"),
}


def celery_options(function: FunctionT) -> FunctionT:
    """Add the options of `celery worker` to `umbel worker`."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


def take_idle(given: dict[str, Any]) -> list[str]:
    """Remove the options without effect from `given`, and return a log line for each."""
    values = {name: given.pop(name) for name in NOTES}
    given_ones = [NOTES[name] for name, value in values.items() if value not in (None, False)]
    return [f"{option} has no effect here: {why}" for option, why in given_ones]


def without_queues(settings: Settings, excluded: list[str] | None) -> Settings:
    """Return the settings without the queues that -X excludes. Raise BadParameter if no queue remains."""
    if excluded is None:
        return settings
    queues = settings.worker_queues or (settings.task_default_queue,)
    remaining = [queue for queue in queues if queue not in excluded]
    if not remaining:
        raise click.BadParameter(
            f"no queue remains to consume of {', '.join(queues)}", param_hint="--exclude-queues"
        )
    return override(settings, worker_queues=remaining)


def names_of(_context: click.Context, parameter: click.Parameter, text: str | None) -> list[str] | None:
    """Split names at commas. Raise BadParameter if there is no name."""
    if text is None:
        return None
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise click.BadParameter(
            f"{text!r} contains no queue name; write queues as a,b", param_hint=parameter.opts[0]
        )
    return names


def concurrency_of(_context: click.Context, _parameter: click.Parameter, text: str | None) -> int | None:
    """Parse -c; return None for `auto`. Raise BadParameter if it is not a whole number."""
    if text is None or text == "auto":
        return None
    try:
        return int(text)
    except ValueError:
        problem = f"{text!r} is not a whole number; write -c 4, or -c auto"
        raise click.BadParameter(problem, param_hint="--concurrency") from None


def sizes_of(
    _context: click.Context, _parameter: click.Parameter, text: str | None
) -> tuple[int, int] | None:
    """Parse MAX,MIN in either order, as Celery does. The minimum is at least 1."""
    if text is None:
        return None
    try:
        sizes = sorted((int(part) for part in text.split(",")), reverse=True)
        most, least = sizes if len(sizes) > 1 else (sizes[0], 1)
    except ValueError:
        problem = f"{text!r} is not MAX,MIN; write it as 10,3"
        raise click.BadParameter(problem, param_hint="--autoscale") from None
    return most, max(least, 1) if most > 0 else least


def _refuse_include(_context: click.Context, _parameter: click.Parameter, text: str | None) -> None:
    """Raise UsageError for -I, because child processes would not know these modules."""
    if text is not None:
        raise click.UsageError(
            f"-I {text}: child processes load the app themselves; list the modules in the app: "
            "include = [...]"
        )


def _idle(name: str, *spellings: str, **options: Any) -> Callable[[FunctionT], FunctionT]:
    """Return an option without effect; its help explains why."""
    return click.option(*spellings, name, help=f"No effect: {NOTES[name][1]}.", **options)


def _options() -> Iterator[Callable[[Any], Any]]:
    """Yield the options of `celery worker`, including those without effect."""
    yield click.option(
        "-X", "--exclude-queues", metavar="A,B", callback=names_of, help="Consume all queues except these."
    )
    yield click.option(
        "--purge", "--discard", is_flag=True, help="Remove all waiting messages from the queues first."
    )
    yield click.option(
        "--heartbeat-interval",
        "heartbeat_interval_s",
        type=float,
        metavar="SECONDS",
        help="Minimum interval between heartbeats.",
    )
    yield click.option(
        "--pool-start-method",
        "worker_child_start",
        type=click.Choice(("fork", "spawn")),
        help="How child processes start.",
    )
    yield click.option(
        "-D", "--detach", is_flag=True, help="Run in the background; errors are only written to --logfile."
    )
    yield click.option(
        "--pidfile", metavar="FILE", help="File for the process id; %n is the node's name, %h the host."
    )
    yield click.option("--uid", metavar="USER", help="Run as this user; requires root.")
    yield click.option("--gid", metavar="GROUP", help="Run as this group; requires root.")
    yield click.option(
        "--umask", metavar="MASK", help="Permission bits that new files do not get; octal, such as 022."
    )
    yield click.option("--executable", metavar="PYTHON", help="With -D: the Python interpreter to use.")
    yield click.option(
        "--workdir", type=click.Path(exists=True, file_okay=False), help="Directory to run in."
    )
    yield click.option(
        "-I", "--include", metavar="MODULES", callback=_refuse_include, expose_value=False, hidden=True
    )
    yield _idle("beat", "-B", "--beat", is_flag=True)
    yield _idle("optimization", "-O", "--optimization", type=click.Choice(("default", "fair")))
    yield _idle("prefetch_multiplier", "--prefetch-multiplier", type=int)
    yield _idle("disable_prefetch", "--disable-prefetch", is_flag=True)
    yield _idle("statedb", "-S", "--statedb", metavar="FILE")
    yield _idle("schedule_filename", "-s", "--schedule-filename", "--schedule", metavar="FILE")
    yield _idle("scheduler", "--scheduler", metavar="CLASS")


_OPTIONS = tuple(_options())


# ---- worker ----------------------------------------------------------------------------------------

_POOL_ALIASES = {"processes": "prefork"}  # the alias that Celery accepts


@click.command("worker")
@app_option
@other_broker_option
@click.option(
    "-c",
    "--concurrency",
    "worker_concurrency",
    metavar="NUMBER",
    callback=concurrency_of,
    help="Tasks that run at once; default, or auto: one per core, 100 in green pools.",
)
@click.option(
    "-n", "--hostname", metavar="NAME[@HOST]", help="The node's name; %h is this host, %d its domain."
)
@click.option(
    "-Q",
    "--queues",
    "worker_queues",
    metavar="A,B",
    callback=names_of,
    shell_complete=completion.queues,
    help="Queues to consume, in fair rotation.",
)
@click.option(
    "-P",
    "--pool",
    "worker_pool",
    callback=lambda _context, _parameter, value: _POOL_ALIASES.get(value, value),
    help="prefork (default), asyncio, gevent, threads or solo.",
)
@log_options("info; in child processes of a Celery project warning, as in Celery")
@click.option(
    "-f",
    "--logfile",
    type=click.Path(dir_okay=False),
    help="Log file instead of stderr; %n is the node's name, %I -1, -2, … in child processes.",
)
@click.option(
    "-E",
    "task_send_events",
    "--task-events",
    "--events",
    is_flag=True,
    default=None,
    help="Send an event at every step of a task.",
)
@click.option(
    "--without-mingle",
    is_flag=True,
    default=None,
    help="Do not exchange state with other nodes at the start.",
)
@click.option(
    "--without-gossip", is_flag=True, default=None, help="Do not listen to the events of other nodes."
)
@click.option(
    "--without-schedule", is_flag=True, default=None, help="Never send the periodic tasks from this worker."
)
@click.option("--without-heartbeat", is_flag=True, default=None, help="Send no heartbeats.")
@click.option(
    "--grace", "worker_grace_s", type=float, help="Seconds to wait for running tasks at shutdown; default 30."
)
@click.option(
    "--time-limit", "task_time_limit_s", type=float, help="Hard limit in seconds for tasks that set none."
)
@click.option(
    "--soft-time-limit",
    "task_soft_time_limit_s",
    type=float,
    help="Soft limit in seconds for tasks that set none.",
)
@click.option(
    "--max-tasks-per-child",
    "worker_max_tasks_per_child",
    type=int,
    help="Replace a child process after this many tasks.",
)
@click.option(
    "--max-memory-per-child",
    "worker_max_memory_per_child",
    metavar="SIZE",
    help="Replace a child process that uses more memory, after its task; in KiB, or with a unit: 200MB.",
)
@click.option(
    "--web",
    "web_port",
    type=click.IntRange(0, 65_535),
    metavar="PORT",
    help="Also serve the dashboard on this port of localhost, in a separate process.",
)
@click.option(
    "--metrics",
    "worker_metrics",
    metavar="[HOST:]PORT",
    help="Serve Prometheus metrics of this worker; on localhost unless a host is given.",
)
@click.option(
    "--record",
    metavar="PLACE",
    help="Record the cluster's history there, in a separate process, unless a recorder runs.",
)
@click.option(
    "--autoscale",
    "worker_autoscale",
    metavar="MAX,MIN",
    callback=sizes_of,
    help="Adjust the number of child processes to the load, within these limits; MIN defaults to 1.",
)
@celery_options
@run_directory_option
@json_option
def command(
    app_name: str | None,
    url: str | None,
    hostname: str | None,
    exclude_queues: list[str] | None,
    loglevel: str | None,
    log_format: str | None,
    logfile: str | None,
    record: str | None,
    web_port: int | None,
    purge: bool,
    run_directory: Path | None,
    as_json: bool,
    **flags: Any,  # options of the process, and options with the name of the setting that they override
) -> int:
    """Run a worker: fetch tasks from the broker and run them in child processes.

    SIGTERM or Ctrl-C: finish running tasks, requeue waiting ones, exit 0. Twice: interrupt running tasks.
    Three times, or SIGQUIT: requeue running tasks at once. SIGUSR1: log the stacks of all processes.
    """

    gc.disable()  # starting creates little garbage, and collecting it would take 5 % of the time
    click.get_current_context().call_on_close(gc.enable)  # also if the worker fails to start
    node, level = node_name(hostname), level_of(loglevel or "info")
    as_json = as_json or log_format == "json"
    pidfile = become_the_process(flags, logfile, node)
    use_broker(url)
    fork_point = ForkPoint()
    set_up_logging(level, logfile=logfile, as_json=as_json, node=node)
    _listen_to_signals()
    found = find_app(app_name)
    notes = take_idle(flags)
    recorded = {"history_lake": record, "worker_record": True} if record else {}
    if web_port is not None:
        require_web()
    settings = override(found.worker_settings(node), **flags, **recorded)
    settings = without_queues(settings, exclude_queues)
    refuse_few_descriptors(settings)
    child_level = "WARNING" if loglevel is None and found.celery else level.upper()
    logs = ChildLogs(child_level, logfile, as_json)
    with (
        pid_file(pidfile),
        started_early(fork_point, found, settings, node, logs) as first_server,
    ):
        # The fork server and its children do not need this import.
        from umbel.cli.run.running_worker import LoadedWorker, run_worker

        run_worker(
            LoadedWorker(
                found, settings, node, run_directory or default_run_directory(), level, logs, app_name
            ),
            first_server,
            notes=notes,
            purge=purge,
            dashboard=None if web_port is None else ["--port", str(web_port)],
        )
    return exits.OK


def become_the_process(flags: dict[str, Any], logfile: str | None, node: str) -> str | None:
    """Apply the options about this process (user, folder, background) before the app is loaded; return the
    pid file.
    """
    workdir, pidfile = flags.pop("workdir"), flags.pop("pidfile")
    detached, executable = flags.pop("detach"), flags.pop("executable")
    if workdir is not None:
        os.chdir(workdir)
    switch_user(flags.pop("uid"), flags.pop("gid"), flags.pop("umask"))
    pidfile = pidfile and log_path(pidfile, node, 0)
    if detached:
        refuse_if_running(pidfile)
        refuse_unwritable(logfile, node)
        detach(executable, sys.argv[1:])
    return pidfile


def _listen_to_signals() -> None:
    """Make SIGTERM exit with 0 until the worker installs its own handlers.

    The process exits without an exception, because user code that is being imported could catch an exception.
    """

    signal.signal(signal.SIGTERM, lambda _signum, _frame: os._exit(exits.OK))
    log_own_stacks_on_signal()
