"""`umbel history build`: build the tables from the recorded events, with Spark or with local processes."""

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import click

from umbel.cli import exits
from umbel.cli.history.lake import history_options
from umbel.cli.options import json_option, print_json, print_table
from umbel.errors import ConfigurationError, UmbelError
from umbel.events.tables import TABLES
from umbel.history.lake import Lake
from umbel.stores.interface import Store, Where
from umbel.stores.local import mode_of, store_at

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress

    from umbel.pipeline.engines import Engine
    from umbel.pipeline.io import Found, Manifest


@click.command("build")
@history_options
@click.option("--master", metavar="URL", help="Spark master: local[4], spark://host:7077, sc://host:15002.")
@click.option(
    "--engine",
    type=click.Choice(["spark", "local"]),
    default="spark",
    show_default=True,
    help="What runs the build; local: processes on this machine, without Java.",
)
@click.option("--tables", metavar="A,B", help="Build only these tables.")
@click.option(
    "--follow",
    "is_following",
    is_flag=True,
    help="Keep running, and publish new tables when there are new events.",
)
@click.option(
    "--until-caught-up", is_flag=True, help="With --follow: stop when all recorded events are published."
)
@click.option(
    "--every",
    "every_s",
    type=click.FloatRange(min=0.1),
    default=30.0,
    show_default=True,
    metavar="SECONDS",
    help="With --follow: seconds between checks for new events.",
)
@click.option(
    "--afresh",
    is_flag=True,
    help="Build from all recorded events instead of extending the last build.",
)
@click.option("--conf", "pairs", metavar="NAME=VALUE", multiple=True, help="A Spark setting.")
@json_option
def build(
    lake: Where,
    master: str | None,
    engine: str,
    tables: str | None,
    is_following: bool,
    until_caught_up: bool,
    every_s: float,
    afresh: bool,
    pairs: tuple[str, ...],
    as_json: bool,
) -> int:
    """Build the tables from the recorded events, and publish them together.

    A build extends the last build with new events. It reads all events with --afresh, with other tables, or
    if recorded events were deleted since the last build.

    Unreadable files are listed and moved to the lake's quarantine. The tables are built from the other
    files, and the exit code is 75.
    """
    wanted, conf, is_local = _wanted(tables), _conf(pairs), engine == "local"
    if is_local and (master or pairs):
        raise ConfigurationError(
            "--engine local has no Spark: leave --master and --conf out, or leave it out"
        )
    if afresh and is_following:
        raise ConfigurationError("--follow extends the last build: build once with --afresh, then follow")
    with _faults_as_errors():
        from umbel.pipeline import io
        from umbel.pipeline.build import build as make
        from umbel.pipeline.build import sound

        store = _existing(store_at(lake))
        with _as_open_as(store), io.locked(store), _progress() as progress:
            look = _Look(store, progress, may_be_empty=is_following and not until_caught_up)
            found = look()
            published = partial(_report_published, progress, is_following=is_following, as_json=as_json)
            spark = partial(_spark, master, progress, store, conf)
            with _engine(spark, is_local=is_local) as chosen:
                if not is_following:
                    how: Any = {"only": wanted, "tell": progress.tell, "afresh": afresh}
                    published(sound(found, look, lambda rest: make(chosen, store, rest, **how)))
                    return look.exit_code()
                from umbel.pipeline.build import Following, follow

                look.may_be_empty = True
                following = Following(
                    look=look,
                    published=published,
                    until_caught_up=until_caught_up,
                    every_s=every_s,
                    only=wanted,
                    tell=progress.tell,
                )
                with _stopped_by_signals() as stop:
                    follow(chosen, store, following, stop=stop)
    return look.exit_code()


@contextmanager
def _spark(
    master: str | None,
    progress: "Progress",
    store: Store,
    conf: dict[str, str],
) -> Iterator[Any]:
    """Open a Spark session. Its working files are in the lake if the lake is a folder, else in a temporary
    folder.
    """
    from umbel.pipeline import engines

    progress.tell("starting Spark", 0, 1)
    root = store.path("")
    if root is not None:  # files that Spark writes get the permissions of the lake
        conf = {"spark.hadoop.fs.permissions.umask-mode": f"{0o777 & ~mode_of(root):03o}", **conf}
    with TemporaryDirectory(prefix="umbel-spark-") as elsewhere:
        folder = store.path(".work") or Path(elsewhere)
        with engines.spark_session(master, work_folder=folder, conf=conf) as spark:
            yield spark


@contextmanager
def _engine(spark: Callable[[], AbstractContextManager[Any]], *, is_local: bool) -> Iterator["Engine"]:
    """Start the engine that runs the jobs: local processes or Spark."""
    from umbel.pipeline.engines import NOT_BUILT, LocalEngine, SparkEngine, failing_as

    if is_local:
        with LocalEngine() as processes:
            yield processes
    else:
        with spark() as session:
            executors = SparkEngine(session)
            with failing_as(NOT_BUILT):
                executors.start()
            yield executors


@contextmanager
def _as_open_as(store: Store) -> Iterator[None]:
    """Set the umask, so that files that Java writes get the permissions of the lake."""
    root = store.path("")
    if root is None:
        yield
        return
    former = os.umask(0o777 & ~mode_of(root))
    try:
        yield
    finally:
        os.umask(former)


def _wanted(tables: str | None) -> list[str]:
    """Parse --tables. Raise ConfigurationError for an unknown table."""
    names = [name.strip() for name in (tables or "").split(",") if name.strip()]
    for name in names:
        if name not in TABLES:
            raise ConfigurationError(f"unknown table {name!r}; the tables are {', '.join(TABLES)}")
    return names


def _conf(pairs: tuple[str, ...]) -> dict[str, str]:
    """Parse the values of --conf."""
    for pair in pairs:
        if "=" not in pair:
            raise ConfigurationError(f"--conf {pair!r} is not NAME=VALUE")
    return dict(pair.split("=", 1) for pair in pairs)


def _existing(store: Store) -> Store:
    """Return the store. Raise EmptyLake if there is no lake."""
    from umbel.pipeline import EmptyLake

    if not store.is_there():
        raise EmptyLake(
            f"there is no lake at {store.where}; name another with --lake, or record one with `umbel record`"
        )
    return store


class _Look:
    """Finds the readable files of the lake; reports unreadable files and moves them to the quarantine."""

    def __init__(self, store: Store, progress: "Progress", *, may_be_empty: bool) -> None:
        self.may_be_empty = may_be_empty
        self._has_unreadable = False
        self._store = store
        self._progress = progress
        self._known: dict[str, int] = {}

    def exit_code(self) -> int:
        return exits.PARTIAL if self._has_unreadable else exits.OK

    def __call__(self, thorough: bool = False) -> "Found":
        """Check the files, move unreadable files to the quarantine, and return the others."""
        from umbel.pipeline import EmptyLake, io
        from umbel.pipeline.io import look_into

        lake = Lake(self._store)
        if thorough:
            self._progress.tell("checking for damage", 0, 1)
        if not self._known and (state := io.newest_state(self._store)) is not None:
            self._known = state.files
        found = look_into(self._store, lake.event_files(), thorough=thorough, known=self._known)
        self._known = found.rows_of()
        self._has_unreadable |= bool(found.unreadable)
        for file in found.unreadable:
            moved = lake.set_aside(file.name)
            with self._progress.aside():
                where = self._store.where
                problem = f"{where}/{file.name} cannot be read ({file.why}); moved to {where}/{moved}"
                click.echo(f"umbel: {problem}", err=True)
        if not found.files and not self.may_be_empty:
            hint = f"record some with `umbel record --lake {self._store.where}`"
            raise EmptyLake(f"there are no events in {self._store.where} yet; {hint}")
        return found


@contextmanager
def _stopped_by_signals() -> Iterator[threading.Event]:
    """Yield an event that SIGTERM and SIGINT set, to stop following after the current round."""
    stop = threading.Event()
    former = {
        number: signal.signal(number, lambda *_: stop.set()) for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        yield stop
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


@contextmanager
def _faults_as_errors() -> Iterator[None]:
    """Convert errors of the pipeline to those that the command line maps to exit codes."""
    try:
        from umbel import pipeline as faults
    except ImportError:
        raise ConfigurationError("the pipeline needs Spark and Arrow: pip install 'umbel[history]'") from None
    # Py4J logs many lines when Java exits. The error below is one line.
    logging.basicConfig(handlers=[logging.NullHandler()])
    try:
        yield
    except ImportError as error:
        raise ConfigurationError(f"the pipeline needs {error.name}: pip install 'umbel[history]'") from None
    except faults.EmptyLake as fault:
        click.echo(f"umbel: {fault}", err=True)
        raise click.exceptions.Exit(exits.NOT_FOUND) from None
    except (faults.NoJava, faults.NoSpark) as fault:
        raise ConfigurationError(str(fault)) from None
    except faults.PipelineFault as fault:
        raise UmbelError(str(fault)) from None
    except OSError as error:
        raise UmbelError(
            f"{error.filename or 'the lake'}: {error.strerror or error}; fix this, and build again"
        ) from None


class Progress:
    """Shows the current step of a build. This class shows nothing; `_Bar` is for terminals."""

    def tell(self, what: str, done: int, total: int) -> None:
        """Show a step of the build, with `done` of `total` parts completed."""

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Hide the progress bar while the block prints."""
        yield


class _Bar(Progress):
    """Shows the current step as a progress bar on a terminal."""

    def __init__(self, bar: "RichProgress") -> None:
        self._bar = bar
        self._step = bar.add_task("looking for events in the lake", total=None)

    def tell(self, what: str, done: int, total: int) -> None:
        is_counted = total > 1 and what
        place = f" ({done + 1} of {total})" if is_counted else ""
        self._bar.update(
            self._step,
            description=f"{what or 'publishing'}{place}",
            completed=done,
            total=total if is_counted else None,  # the duration is unknown
        )

    @contextmanager
    def aside(self) -> Iterator[None]:
        self._bar.stop()
        try:
            yield
        finally:
            self._bar.start()


@contextmanager
def _progress() -> Iterator[Progress]:
    """Yield the progress display: a bar on a terminal, else one that shows nothing."""
    if not sys.stderr.isatty():
        yield Progress()
        return
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as RichProgress

    columns = (TextColumn("{task.description:<22}"), BarColumn(), TimeElapsedColumn())
    # This is a duplicate of stderr, because stderr is redirected to a log while Java starts. Rich must not
    # redirect stdout: it would print the command's output to the terminal.
    with os.fdopen(os.dup(sys.stderr.fileno()), "w", encoding="utf-8") as terminal:
        console = Console(file=terminal)
        with RichProgress(
            *columns, console=console, transient=True, redirect_stdout=False, redirect_stderr=False
        ) as bar:
            yield _Bar(bar)


def _report_published(progress: Progress, manifest: "Manifest", *, is_following: bool, as_json: bool) -> None:
    with progress.aside():
        _print_summary(manifest, as_json=as_json)
    if is_following:
        progress.tell("waiting for events", 0, 1)


def _print_summary(manifest: "Manifest", *, as_json: bool) -> None:
    """Print the figures of a published build."""
    figures: dict[str, Any] = {
        "build": manifest.build,
        "events": manifest.events,
        "files": manifest.source_files,
        **manifest.rows,
        "seconds": round(manifest.seconds, 1),
        "events_per_s": round(manifest.events / max(manifest.seconds, 0.001)),
        "quarantined": manifest.quarantined,
    }
    if as_json:
        print_json(figures)
        return
    shown = figures | {"quarantined": ", ".join(manifest.quarantined) or "none"}
    print_table(("what", "value"), [(name.replace("_", " "), value) for name, value in shown.items()])
