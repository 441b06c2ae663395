"""The `umbel` command: lists the commands and loads the one that was asked for.

Each command lives in a file of its own and is imported only when it runs, so that `umbel health`
answers in a moment. Whatever Umbel itself finds wrong ends here as one line and an exit code.
"""

import sys
from importlib import import_module

import click

from umbel.cli import exits
from umbel.errors import BrokerUnavailable, ConfigurationError, NothingBuilt, UmbelError, nearest
from umbel.text import one_line
from umbel.version import VERSION

COMMANDS = {
    "worker": "Run a worker: take tasks from the broker and run them in child processes.",
    "dev": "Work on your tasks: a worker that starts anew when the code changes.",
    "call": "Send a task.",
    "result": "Show the result of a task.",
    "queues": "List, look into or empty the queues.",
    "dlq": "The dead letters: tasks that could not be run.",
    "status": "Show the workers at a glance, and what their broker supports.",
    "ping": "Ask the workers whether they are there.",
    "inspect": "Ask workers what they know: active, stats, registered, ...",
    "control": "Tell workers what to do: rate_limit, add_consumer, shutdown, ...",
    "revoke": "See to it that tasks never start, or end those that run.",
    "members": "Show the nodes of the cluster; with --watch, who comes and goes.",
    "clock": "Show the logical clocks of the cluster.",
    "election": "Have one worker do something; see how elections ended, or watch them.",
    "schedule": "The periodic tasks: list them, run one now, pause and resume.",
    "events": "Show what happens in the cluster, as it happens, in its order.",
    "record": "Write down what happens: the broker's event log as files.",
    "task": "Show the story of a task: every event of it, in causal order.",
    "history": "Build tables from what was recorded, and read them: rows, SQL, a report.",
    "top": "Watch the cluster in the terminal: members, queues, tasks, one task's story.",
    "health": "Say whether the workers on this machine are well.",
    "doctor": "Check this machine and the app's settings.",
    "simulate": "Simulate elections under faults, and check every promise.",
    "demo": "See it work: three workers under load, one killed, an election, history.",
}


class LazyCommands(click.Group):
    """A group that knows its commands by name and imports only the one that is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = import_module(f"umbel.cli.{cmd_name}").command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        # click guesses among the commands it has loaded, which here are none.
        near = "" if args[0] in COMMANDS else nearest(args[0], COMMANDS)
        if near:
            raise click.UsageError(f"No such command {args[0]!r}. Did you mean {near!r}?", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=LazyCommands, context_settings={"help_option_names": ["-h", "--help"]})
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
