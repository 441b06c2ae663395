"""The `umbel` command: list the commands, and load the command that is called.

An error of Umbel is printed as one line on stderr, and its type decides the exit code. Other exceptions are
bugs and keep their traceback.
"""

import sys

import click

from umbel.cli import exits
from umbel.cli.lazy import Lazy, LazyGroup
from umbel.errors import BrokerUnavailable, ConfigurationError, NothingBuilt, UmbelError
from umbel.files import ran_out
from umbel.text import one_line
from umbel.version import VERSION

COMMANDS = {
    "worker": Lazy(
        "run.worker", "Run a worker: fetch tasks from the broker and run them in child processes."
    ),
    "dev": Lazy("run.dev", "Run a worker for development, which restarts when the code changes."),
    "call": Lazy("call:send_task_command", "Send a task."),
    "result": Lazy("call:result_command", "Show the result of a task."),
    "queues": Lazy("queues", "List, peek into or purge the queues."),
    "dlq": Lazy("failed", "List, show, requeue or drop dead letters: tasks that could not be run."),
    "outbox": Lazy(
        "schedule:outbox_command",
        "Show, create or repair outboxes: tasks that are sent in database transactions.",
    ),
    "status": Lazy("workers:status_command", "Show the state of the workers, and what the broker supports."),
    "ping": Lazy("workers:ping_command", "Check which workers reply."),
    "inspect": Lazy("workers:inspect_workers_command", "Query workers: active, stats, registered, ..."),
    "control": Lazy(
        "workers:control_workers_command", "Send commands to workers: rate_limit, add_consumer, shutdown, ..."
    ),
    "revoke": Lazy("workers:revoke_command", "Prevent tasks from starting, or terminate running ones."),
    "members": Lazy(
        "coordination:members_command",
        "Show the nodes of the cluster; with --watch, which nodes join and leave.",
    ),
    "clock": Lazy("workers:clock_command", "Show the logical clocks of the cluster."),
    "cluster-id": Lazy(
        "coordination:cluster_id_command",
        "Show, create or restore the cluster id that signatures are bound to.",
    ),
    "election": Lazy(
        "coordination:election_command", "Elect one worker to do something; list or watch elections."
    ),
    "schedule": Lazy("schedule", "List, run, pause and resume periodic tasks."),
    "events": Lazy("watch:events_command", "Show the events of the cluster live, in causal order."),
    "record": Lazy("run.record", "Record the cluster's events as Parquet files."),
    "task": Lazy("task", "Show the history of a task; list and retry failed tasks."),
    "history": Lazy("history.group", "Build tables from recorded events and query them: rows, SQL, report."),
    "top": Lazy("watch:top_command", "Monitor the cluster in the terminal: members, queues, tasks."),
    "mark": Lazy("watch:mark_command", "Add a mark to the charts, for example for a deployment."),
    "web": Lazy("run.web", "Monitor and control the cluster in the browser."),
    "health": Lazy("run.health", "Check whether the workers on this machine are healthy."),
    "doctor": Lazy("run.doctor", "Check this machine and the app's settings."),
    "simulate": Lazy("run.simulate", "Simulate elections under faults, and check every guarantee."),
    "celery": Lazy("celery", "Check what a Celery project uses before Umbel runs its worker."),
    "demo": Lazy("run.demo", "Run a demo: three workers under load, one killed, an election, history."),
}


@click.group(cls=LazyGroup, places=COMMANDS, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "-A", "--app", "app_name", metavar="MODULE[:ATTR]", help="The app; default: ./tasks.py or ./app.py."
)
@click.version_option(VERSION, prog_name="umbel", message="%(prog)s, version %(version)s")
@click.pass_context
def cli(ctx: click.Context, app_name: str | None) -> None:
    """Umbel: a distributed task queue whose workers coordinate with each other."""
    ctx.obj = app_name


def main() -> None:
    """Run the command line. Print an error of Umbel as one line on stderr, and exit with its code."""
    try:
        code = cli(prog_name="umbel", standalone_mode=False)
    except click.exceptions.Abort:
        _say("stopped")
        code = exits.FAILED
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        code = error.exit_code
    except click.ClickException as error:
        _say(_in_one_line(error))
        code = error.exit_code
    except ConfigurationError as error:
        _say(str(error))
        code = exits.USAGE
    except BrokerUnavailable as error:
        _say(str(error))
        code = exits.NOBODY_ANSWERED
    except NothingBuilt as error:
        _say(str(error))
        code = exits.NOT_FOUND
    except UmbelError as error:
        _say(str(error))
        code = exits.FAILED
    except OSError as error:
        from umbel.stores.interface import Unavailable

        if no_files := ran_out(error):
            _say(no_files)
        elif isinstance(error, Unavailable):
            _say(f"the lake cannot be used: {error.filename}: {error}")
        else:
            raise
        code = exits.FAILED
    except SystemExit:  # click exits when the reader closes the pipe: `umbel queues peek | head`
        code = exits.OK
    sys.exit(code if isinstance(code, int) else exits.OK)


def _in_one_line(error: click.ClickException) -> str:
    """Return the message of a usage error, with a hint to --help."""
    context = error.ctx if isinstance(error, click.UsageError) else None
    hint = f" (see {context.command_path} --help)" if context else ""
    return error.format_message() + hint


def _say(problem: str) -> None:
    """Print an error on stderr in one line."""
    click.echo(one_line(f"umbel: {' '.join(problem.split())}"), err=True)


if __name__ == "__main__":
    main()
