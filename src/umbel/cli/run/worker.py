"""`umbel worker`: run a worker until it is told to stop."""

import asyncio
import logging
import os
import signal
from pathlib import Path

import click

from umbel.app.configuration.settings import override
from umbel.cli import exits
from umbel.cli.options import app_option, json_option, run_directory_option
from umbel.launch.loading import find_app
from umbel.launch.workers import make_worker, node_name
from umbel.logs import set_up_logging
from umbel.pools.loops import loop_factory
from umbel.worker.process.run_directory import default_run_directory
from umbel.worker.process.stack_dump import log_own_stacks_on_signal

LEVELS = ("debug", "info", "warning", "error")
log = logging.getLogger("umbel.worker")


@click.command("worker")
@app_option
@click.option(
    "-c", "--concurrency", type=int, help="Tasks that run at once; default: one per core, 100 in green pools."
)
@click.option("-n", "--hostname", metavar="NAME[@HOST]", help="The node's name; %h is this host.")
@click.option("-Q", "--queues", metavar="A,B", help="Queues to consume, in a fair rotation.")
@click.option("-P", "--pool", help="prefork (default), asyncio, gevent, threads or solo.")
@click.option("-l", "--loglevel", type=click.Choice(LEVELS, case_sensitive=False), default="info")
@click.option(
    "-f",
    "--logfile",
    type=click.Path(dir_okay=False),
    help="Log file instead of stderr; %n is the node's name, %I -1, -2, … in child processes.",
)
@click.option(
    "-E", "--task-events", is_flag=True, default=None, help="Send an event at every step of a task."
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
@click.option("--without-heartbeat", is_flag=True, default=None, help="Send no heartbeats.")
@click.option("--grace", type=float, help="Seconds to wait for running tasks at shutdown; default 30.")
@click.option("--time-limit", type=float, help="Hard limit in seconds for tasks that set none.")
@click.option("--soft-time-limit", type=float, help="Soft limit in seconds for tasks that set none.")
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
@click.option("--record", metavar="DIR", help="Record the cluster's history there if no other recorder runs.")
@click.option(
    "--autoscale",
    "worker_autoscale",
    metavar="MAX,MIN",
    callback=lambda _context, _parameter, value: _sizes(value),
    help="Limits for the number of child processes, by load; MIN defaults to 1.",
)
@run_directory_option
@json_option
def command(
    app_name: str | None,
    concurrency: int | None,
    hostname: str | None,
    queues: str | None,
    pool: str | None,
    loglevel: str,
    logfile: str | None,
    task_events: bool | None,
    grace: float | None,
    time_limit: float | None,
    soft_time_limit: float | None,
    record: str | None,
    run_directory: Path | None,
    as_json: bool,
    **flags: object,  # named like the settings that they override
) -> int:
    """Run a worker: fetch tasks from the broker and run them in child processes.

    SIGTERM or Ctrl-C: finish running tasks, requeue the rest, exit 0. Twice: interrupt running tasks.
    Three times, or SIGQUIT: requeue running tasks at once. SIGUSR1: log the stacks of all processes.
    """

    node = node_name(hostname)
    set_up_logging(loglevel, logfile=logfile, as_json=as_json, node=node)
    _listen_to_signals()
    found = find_app(app_name)
    settings = override(
        found.app.settings,
        worker_concurrency=concurrency,
        worker_queues=_names(queues),
        worker_pool=pool,
        task_send_events=task_events,
        **({"history_lake": record, "worker_record": True} if record else {}),
        worker_grace_s=grace,
        task_time_limit_s=time_limit,
        task_soft_time_limit_s=soft_time_limit,
        **flags,
    )

    async def run() -> None:
        worker = make_worker(
            found,
            settings,
            node=node,
            run_directory=run_directory or default_run_directory(),
            loglevel=loglevel.upper(),
            logfile=logfile,
            log_json=as_json,
        )
        await worker.run()

    with asyncio.Runner(loop_factory=loop_factory(settings.worker_loop)) as runner:
        runner.run(run())
    return exits.OK


def _listen_to_signals() -> None:
    """Until the worker does so itself: a request to stop is no failure.

    What is imported meanwhile is users' code, which could catch an exception.
    """

    signal.signal(signal.SIGTERM, lambda _signum, _frame: os._exit(exits.OK))
    log_own_stacks_on_signal()


def _names(queues: str | None) -> list[str] | None:
    if queues is None:
        return None
    names = [name.strip() for name in queues.split(",") if name.strip()]
    if not names:
        raise click.BadParameter(f"{queues!r} names no queue; write queues as a,b", param_hint="--queues")
    return names


def _sizes(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    most, _, least = text.partition(",")
    try:
        return int(most), int(least or 1)
    except ValueError:
        problem = f"{text!r} is not MAX,MIN; write it as 10,3"
        raise click.BadParameter(problem, param_hint="--autoscale") from None
