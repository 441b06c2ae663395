"""Options that people type after `celery worker`, under the same names after `umbel worker`.

Each has an effect, or a line in the log that says why it has none here.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import click

from umbel.app.configuration.settings import Settings, override

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])
log = logging.getLogger("umbel.worker")

_CLAIMED = "messages are claimed as child processes become free"
# Why an option that was given does nothing: how it is written, and what is so without it.
NOTES: Mapping[str, tuple[str, str]] = {
    "beat": ("-B", "every worker can send the schedule, and one does, under a lease"),
    "optimization": ("-O", "a message goes to a child process that is free, which is what fair means"),
    "prefetch_multiplier": ("--prefetch-multiplier", _CLAIMED),
    "disable_prefetch": ("--disable-prefetch", _CLAIMED),
    "statedb": ("-S", "revoked tasks are recorded at the broker, and clocks in the run directory"),
    "schedule_filename": ("-s", "when periodic tasks ran is recorded at the broker"),
    "scheduler": ("--scheduler", "the app's setting beat_scheduler names it"),
}


def celery_options(function: FunctionT) -> FunctionT:
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


def take_idle(given: dict[str, Any]) -> list[str]:
    """Take the options that do nothing from those given; what to say of them."""
    values = {name: given.pop(name) for name in NOTES}
    given_ones = [NOTES[name] for name, value in values.items() if value not in (None, False)]
    return [f"{option} has no effect here: {why}" for option, why in given_ones]


def without_queues(settings: Settings, excluded: list[str] | None) -> Settings:
    """-X: of the queues that would be consumed, all but these."""
    if excluded is None:
        return settings
    queues = settings.worker_queues or (settings.task_default_queue,)
    left = [queue for queue in queues if queue not in excluded]
    if not left:
        raise click.BadParameter(
            f"no queue is left to consume of {', '.join(queues)}", param_hint="--exclude-queues"
        )
    return override(settings, worker_queues=left)


def names_of(_context: click.Context, parameter: click.Parameter, text: str | None) -> list[str] | None:
    """Names with commas between them."""
    if text is None:
        return None
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise click.BadParameter(
            f"{text!r} contains no queue name; write queues as a,b", param_hint=parameter.opts[0]
        )
    return names


def concurrency_of(_context: click.Context, _parameter: click.Parameter, text: str | None) -> int | None:
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
    """MAX,MIN in either order, as Celery takes them; one child process always stays."""
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
    if text is not None:
        raise click.UsageError(
            f"-I {text}: child processes load the app by themselves; name its modules in the app: "
            "include = [...]"
        )


def _idle(name: str, *spellings: str, **options: Any) -> Callable[[FunctionT], FunctionT]:
    return click.option(*spellings, name, help=f"No effect: {NOTES[name][1]}.", **options)


def _options() -> Iterator[Callable[[Any], Any]]:
    yield click.option(
        "-X", "--exclude-queues", metavar="A,B", callback=names_of, help="Consume all queues but these."
    )
    yield click.option(
        "--purge", "--discard", is_flag=True, help="Remove all waiting messages from the queues first."
    )
    yield click.option(
        "--heartbeat-interval",
        "heartbeat_interval_s",
        type=float,
        metavar="SECONDS",
        help="Least interval between heartbeats.",
    )
    yield click.option(
        "--pool-start-method",
        "worker_child_start",
        type=click.Choice(("fork", "spawn")),
        help="How child processes start.",
    )
    yield click.option(
        "-D", "--detach", is_flag=True, help="Run in the background; errors are only in --logfile."
    )
    yield click.option(
        "--pidfile", metavar="FILE", help="File for the process id; %n is the node's name, %h the host."
    )
    yield click.option("--uid", metavar="USER", help="Run as this user; only root can.")
    yield click.option("--gid", metavar="GROUP", help="Run as this group; only root can.")
    yield click.option("--umask", metavar="MASK", help="Mode bits that new files do not get; octal, as 022.")
    yield click.option("--executable", metavar="PYTHON", help="With -D: the Python to run with.")
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
