"""`umbel worker`: run a worker until it is told to stop.

What is imported here is in the fork server and in every child as well. So what only a running worker needs
is in `running_worker.py`.
"""

import gc
import os
import signal
import sys
from pathlib import Path
from typing import Any

import click

from umbel.app.configuration.settings import override
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
from umbel.cli.run.celery_options import (
    celery_options,
    concurrency_of,
    names_of,
    sizes_of,
    take_idle,
    without_queues,
)
from umbel.cli.run.web_needs import require_web
from umbel.launch.first_server import started_early
from umbel.launch.loading import find_app
from umbel.launch.node_names import node_name
from umbel.launch.pool_choice import ChildLogs
from umbel.logs import log_path, set_up_logging
from umbel.pools.prefork.first_server import ForkPoint
from umbel.worker.process.daemon import become, detach, pid_file, refuse_if_running, refuse_unwritable
from umbel.worker.process.run_directory import default_run_directory
from umbel.worker.process.stack_dump import log_own_stacks_on_signal

_POOL_ALIASES = {"processes": "prefork"}  # as Celery has it


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
    help="Queues to consume, in a fair rotation.",
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
    help="Replace a child process that uses more, after its task; in KiB, or with a unit: 200MB.",
)
@click.option(
    "--web",
    "web_port",
    type=click.IntRange(0, 65_535),
    metavar="PORT",
    help="Serve the dashboard there too, on this machine, in a process beside the worker.",
)
@click.option(
    "--metrics",
    "worker_metrics",
    metavar="[HOST:]PORT",
    help="Serve what this worker counts for Prometheus; on this machine unless a host is named.",
)
@click.option(
    "--record",
    metavar="PLACE",
    help="Have the cluster's history recorded there, by a process beside the worker, if nothing else does.",
)
@click.option(
    "--autoscale",
    "worker_autoscale",
    metavar="MAX,MIN",
    callback=sizes_of,
    help="Limits for the number of child processes, by load; MIN defaults to 1.",
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
    **flags: Any,  # those of the process, and those named like the settings that they override
) -> int:
    """Run a worker: fetch tasks from the broker and run them in child processes.

    SIGTERM or Ctrl-C: finish running tasks, requeue the rest, exit 0. Twice: interrupt running tasks.
    Three times, or SIGQUIT: requeue running tasks at once. SIGUSR1: log the stacks of all processes.
    """

    gc.disable()  # a worker that starts makes little garbage: a twentieth of that time
    click.get_current_context().call_on_close(gc.enable)  # one that does not start, too
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
    child_level = "WARNING" if loglevel is None and found.celery else level.upper()
    logs = ChildLogs(child_level, logfile, as_json)
    with (
        pid_file(pidfile),
        started_early(fork_point, found, settings, node, logs) as first_server,
    ):
        # Only now: the fork server and its children need nothing of it.
        from umbel.cli.run.running_worker import Running, run_worker

        run_worker(
            Running(found, settings, node, run_directory or default_run_directory(), level, logs, app_name),
            first_server,
            notes=notes,
            purge=purge,
            dashboard=None if web_port is None else ["--port", str(web_port)],
        )
    return exits.OK


def become_the_process(flags: dict[str, Any], logfile: str | None, node: str) -> str | None:
    """What the options say of this process, before it loads anything; where its id is written."""
    workdir, pidfile = flags.pop("workdir"), flags.pop("pidfile")
    detached, executable = flags.pop("detach"), flags.pop("executable")
    if workdir is not None:
        os.chdir(workdir)
    become(flags.pop("uid"), flags.pop("gid"), flags.pop("umask"))
    pidfile = pidfile and log_path(pidfile, node, 0)
    if detached:
        refuse_if_running(pidfile)
        refuse_unwritable(logfile and log_path(logfile, node, 0))
        detach(executable, sys.argv[1:])
    return pidfile


def _listen_to_signals() -> None:
    """Until the worker does so itself: a request to stop is no failure.

    What is imported meanwhile is users' code, which could catch an exception.
    """

    signal.signal(signal.SIGTERM, lambda _signum, _frame: os._exit(exits.OK))
    log_own_stacks_on_signal()
