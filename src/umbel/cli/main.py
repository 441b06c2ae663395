"""The `umbel` command: lists the commands and loads the one that was asked for.

Each command has its own file. What Umbel itself finds wrong ends here as one line and an exit code.
"""

import sys

import click

from umbel.cli import exits
from umbel.cli.lazy import Lazy, LazyGroup
from umbel.errors import BrokerUnavailable, ConfigurationError, NothingBuilt, UmbelError
from umbel.text import one_line
from umbel.version import VERSION

COMMANDS = {
    "worker": Lazy("run.worker", "Run a worker: take tasks from the broker and run them in child processes."),
    "dev": Lazy("run.dev", "Work on your tasks: a worker that starts anew when the code changes."),
    "call": Lazy("tasks.call", "Send a task."),
    "result": Lazy("tasks.result", "Show the result of a task."),
    "queues": Lazy("tasks.queues", "List, look into or empty the queues."),
    "dlq": Lazy("tasks.dlq", "The dead letters: tasks that could not be run."),
    "status": Lazy("cluster.status", "Show the workers at a glance, and what their broker supports."),
    "ping": Lazy("cluster.ping", "Ask the workers whether they are there."),
    "inspect": Lazy("cluster.inspect", "Ask workers what they know: active, stats, registered, ..."),
    "control": Lazy("cluster.control", "Tell workers what to do: rate_limit, add_consumer, shutdown, ..."),
    "revoke": Lazy("tasks.revoke", "See to it that tasks never start, or end those that run."),
    "members": Lazy("cluster.members", "Show the nodes of the cluster; with --watch, who comes and goes."),
    "clock": Lazy("cluster.clock", "Show the logical clocks of the cluster."),
    "election": Lazy("cluster.election", "Have one worker do something; list elections, or watch them."),
    "schedule": Lazy("tasks.schedule", "The periodic tasks: list them, run one now, pause and resume."),
    "events": Lazy("cluster.events", "Show what happens in the cluster, as it happens, in its order."),
    "record": Lazy("run.record", "Write down what happens: the broker's event log as files."),
    "task": Lazy("tasks.task", "Show the story of a task: every event of it, in causal order."),
    "history": Lazy("history.group", "Build tables from recorded events, and read them: rows, SQL, report."),
    "top": Lazy("cluster.top", "Watch the cluster in the terminal: members, queues, tasks."),
    "health": Lazy("run.health", "Say whether the workers on this machine are healthy."),
    "doctor": Lazy("run.doctor", "Check this machine and the app's settings."),
    "simulate": Lazy("run.simulate", "Simulate elections under faults, and check every promise."),
    "demo": Lazy("run.demo", "See it work: three workers under load, one killed, an election, history."),
}


@click.group(cls=LazyGroup, places=COMMANDS, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "-A", "--app", "app_name", metavar="MODULE[:ATTR]", help="The app; else ./tasks.py or ./app.py."
)
@click.version_option(VERSION, prog_name="umbel")
@click.pass_context
def cli(ctx: click.Context, app_name: str | None) -> None:
    """Umbel: a distributed task queue whose workers know one another."""
    ctx.obj = app_name


def main() -> None:
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
    except SystemExit:  # click's answer when the reader went away: `umbel queues peek | head`
        code = exits.OK
    sys.exit(code if isinstance(code, int) else exits.OK)


def _in_one_line(error: click.ClickException) -> str:
    context = error.ctx if isinstance(error, click.UsageError) else None
    hint = f" (see {context.command_path} --help)" if context else ""
    return error.format_message() + hint


def _say(problem: str) -> None:
    click.echo(one_line(f"umbel: {' '.join(problem.split())}"), err=True)


if __name__ == "__main__":
    main()
