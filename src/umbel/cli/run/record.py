"""`umbel record`: record the events of a cluster as Parquet files in a lake, until it is stopped."""

import asyncio
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from typing import Any

import click

from umbel.brokers.interface import Broker, EventLogState
from umbel.cli import exits
from umbel.cli.broker import ask_broker
from umbel.cli.history.lake import find_lake, find_lake_mode, lake_option
from umbel.cli.options import (
    app_option,
    broker_option,
    duration,
    json_option,
    level_of,
    log_options,
    print_json,
    print_table,
)
from umbel.errors import LakeError
from umbel.history.housekeeping import backlog_of, expire
from umbel.history.housekeeping import compact as put_together
from umbel.history.lake import QUARANTINE, Lake
from umbel.history.recorder import RecorderSettings
from umbel.history.segment import all_memories
from umbel.logs import set_up_logging
from umbel.protocol.leadership.lease import RotationSettings
from umbel.stores.interface import Where
from umbel.worker.recording import RecorderCandidate, RecordingSettings, recorder_lease
from umbel.worker.sidecar import WITH_PARENT, end_with_parent

NAME = "recorder"
SHOW_EVERY_S = 0.5
STATUS_COLUMNS = ("recorder", "lag", "events", "files", "gaps", "missing", "lost", "unreadable", "last file")


def name_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add --name, the recorder's name. Names that cannot be part of a file name are rejected."""

    def checked(_ctx: click.Context, _parameter: click.Parameter, value: str) -> str:
        if value.replace("_", "").replace(".", "").isalnum() and not value.startswith("."):
            return value
        raise click.BadParameter(
            f"{value!r} cannot be part of a file name; use letters, digits, dots and underscores"
        )

    return click.option(
        "--name", default=NAME, show_default=True, callback=checked, help="The recorder's name at the broker."
    )(function)


@click.group("record", invoke_without_command=True)
@app_option
@broker_option
@lake_option
@name_option
@click.option(
    "--rotate",
    "rotate_s",
    type=click.FloatRange(0.05, 3600),
    default=60.0,
    show_default=True,
    help="Seconds after which a file is closed.",
)
@click.option(
    "--rotate-bytes",
    type=click.IntRange(64 * 1024, 2**30),
    default=64 * 1024 * 1024,
    show_default=True,
    help="Size at which a file is closed.",
)
@click.option("--keep-days", type=click.FloatRange(min=1), help="Delete older days; default: never.")
@click.option(
    "--lease",
    "lease_s",
    type=click.FloatRange(min=0.1),
    default=10.0,
    show_default=True,
    help="Seconds of silence after which a standby recorder takes over.",
)
@click.option(
    WITH_PARENT,
    is_flag=True,
    help="Run next to a worker: exit when standard input closes or another recorder runs.",
)
@click.option("--no-wait", is_flag=True, help="Do not wait while another recorder runs: exit with 75.")
@log_options("info; on a terminal warning")
@click.pass_context
def command(
    ctx: click.Context,
    app_name: str | None,
    url: str | None,
    lake: Where | None,
    name: str,
    rotate_s: float,
    rotate_bytes: int,
    keep_days: float | None,
    lease_s: float,
    with_parent: bool,
    no_wait: bool,
    loglevel: str | None,
    log_format: str | None,
) -> int:
    """Record the cluster's events as Parquet files in a lake, until Ctrl-C or SIGTERM.

    With --broker no app is needed. Celery workers are recorded too. If several recorders have the same name,
    one records and the others stand by. Events are acknowledged after they are on disk, so none are lost if
    the recorder crashes. The broker retains events for a stopped recorder until `umbel record forget`.
    """
    if ctx.invoked_subcommand is not None:
        return exits.OK
    from umbel.history.lake import arrow

    arrow()  # fails with a clear message before anything is registered
    quiet = "warning" if sys.stderr.isatty() else "info"
    set_up_logging(level_of(loglevel or quiet), as_json=log_format == "json")
    rotation = RotationSettings(file_max_bytes=rotate_bytes, file_max_age_s=rotate_s)
    where, recorder = find_lake(ctx, lake), RecorderSettings(name, rotation)
    settings = RecordingSettings(where, recorder, lease_s, keep_days, find_lake_mode(app_name, url))
    if with_parent:
        end_with_parent()
    return ask_broker(
        app_name,
        lambda broker: _record(broker, settings, no_wait=no_wait, beside=with_parent),
        url=url,
    )


async def _record(broker: Broker, settings: RecordingSettings, *, no_wait: bool, beside: bool) -> int:
    """Record until stopped. `beside`: a worker runs next to the recorder; it reports outages and checks for
    other recorders.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop.set)
    reason = ""  # the reason for standing by that was logged last

    def report(why: str, *, ends: bool) -> None:
        """Log why this recorder stands by, once for each reason, or stop it."""
        nonlocal reason
        if ends:
            stop.set()
        elif why != reason:
            logging.getLogger("umbel.history").warning("standing by: %s", why)
        reason = why

    candidate = RecorderCandidate(
        broker,
        settings,
        f"record@{socket.gethostname()}.{os.getpid()}.{time.time_ns() // 1000}",
        quiet=beside,
        elsewhere=partial(report, ends=no_wait or beside),
        busy=partial(report, ends=no_wait),
    )
    is_shown = sys.stderr.isatty() and not beside
    showing = asyncio.create_task(_show(candidate)) if is_shown else None
    try:
        await candidate.run(stop)
    finally:
        if showing is not None:
            showing.cancel()
            click.echo(err=True)
    if reason and no_wait:
        click.echo(f"umbel: {reason}; leave --no-wait out to stand by", err=True)
        return exits.PARTIAL
    return exits.OK


async def _show(candidate: "RecorderCandidate") -> None:
    """On a terminal, show the progress in one line that is updated."""
    while True:
        recorder = candidate.recorder
        if recorder is None:
            line = f"standing by; the recorder is {candidate.leader or 'unknown'}"
        else:
            at = recorder.progress
            line = f"{at.events:,} events, {at.files:,} files, {_bytes(at.size_bytes)}, {at.lag:,} behind"
            line += (
                f" - {at.problem}" if at.problem else "" if candidate.is_ready else " - calling the workers"
            )
        click.echo(f"\r\x1b[K{line[:200]}", err=True, nl=False)
        await asyncio.sleep(SHOW_EVERY_S)


@command.command("status")
@app_option
@broker_option
@lake_option
@json_option
def status(app_name: str | None, url: str | None, lake: Where, as_json: bool) -> int:
    """Show the progress of each recorder, and the contents of the lake.

    Without --broker or an app, only the lake is read. Exit code: 0, or 3 if nothing was ever recorded.
    """

    found = Lake(lake)
    log = ask_broker(app_name, lambda broker: broker.event_log(), url=url) if app_name or url else None
    memories = {memory.name: memory for memory in all_memories(found)}
    names = sorted({*memories, *(log.acknowledged if log else ())})
    size = found.size()
    due = backlog_of(found)
    figures = {
        "lake": found.store.where,
        "files": size.files,
        "bytes": size.size_bytes,
        "quarantined": len(found.store.names(QUARANTINE)),
        "lost_by_log": log.lost if log else None,
        "behind": {"files": due.files, "days": due.days, "replaced": due.replaced},
        "recorders": [_status_of(name, memories.get(name), log) for name in names],
    }
    if as_json:
        print_json(figures)
    else:
        click.echo(
            f"{found.store.where}: {size.files:,} files, {_bytes(size.size_bytes)}, "
            f"quarantined: {figures['quarantined']}"
        )
        rows: Any = figures["recorders"]
        print_table(STATUS_COLUMNS, [_status_row(row) for row in rows])
        if due.files or due.days:
            click.echo(
                f"behind: {due.files:,} files of past hours are not compacted yet, {due.days:,} days"
                " not joined; a recorder does this every ten minutes, or run `umbel record compact`"
            )
    return exits.OK if names or size.files else exits.NOT_FOUND


def _status_of(name: str, memory: Any, log: EventLogState | None) -> dict[str, Any]:
    """Return the status of one recorder, from the lake and from the broker's event log."""
    place = log.acknowledged.get(name) if log else None
    last = datetime.fromtimestamp(memory.updated_at, UTC) if memory and memory.updated_at else None
    counts = ("events", "files", "gaps", "missing", "lost", "unreadable", "starts")
    return {
        "recorder": name,
        "registered": None if log is None else place is not None,
        "acknowledged": place,
        "lag": None if log is None or place is None else log.last_offset - place,
        **{count: getattr(memory, count) if memory else 0 for count in counts},
        "deaf_s": round(memory.deaf_s, 3) if memory else 0.0,
        "last_file_at": last.isoformat(timespec="seconds") if last else None,
    }


def _status_row(recorder: dict[str, Any]) -> list[object]:
    """Return a row that fits into 80 columns. A lag of "-" means that the broker retains no events for this
    recorder, "?" that it was not asked.
    """
    lag = "?" if recorder["registered"] is None else recorder["lag"] if recorder["registered"] else "-"
    last = recorder["last_file_at"]
    age = "-" if last is None else f"{duration(time.time() - datetime.fromisoformat(last).timestamp())} ago"
    shown = recorder | {"lag": lag, "last file": age}
    return [shown[column] for column in STATUS_COLUMNS]


@command.command("compact")
@lake_option
@click.option("--keep-days", type=click.FloatRange(min=1), help="Also delete older days.")
@json_option
def compact(lake: Where, keep_days: float | None, as_json: bool) -> int:
    """Compact past hours and join past days; readers can continue meanwhile.

    A running recorder does this every ten minutes.
    """
    from umbel.history.lake import arrow

    arrow()
    found = _existing(Lake(lake))
    done = put_together(found)
    dropped = expire(found, keep_days) if keep_days is not None else None
    figures: dict[str, Any] = {
        "written": done.written,
        "replaced": len(done.replaced),
        "removed": [*done.removed, *(dropped.removed if dropped else ())],
        "set_aside": done.set_aside,
        "dropped_days": dropped.dropped_days if dropped else [],
    }
    if as_json:
        print_json(figures)
    else:
        click.echo(
            f"{len(done.replaced):,} files merged into {len(done.written):,}; "
            f"{len(figures['removed']):,} removed; "
            f"days dropped: {', '.join(figures['dropped_days']) or 'none'}"
        )
        for name in done.set_aside:
            click.echo(f"umbel: unreadable file moved to {name}", err=True)
    return exits.OK


@command.command("forget")
@app_option
@broker_option
@click.argument("name", default=NAME)
@json_option
def forget(app_name: str | None, url: str | None, name: str, as_json: bool) -> int:
    """Stop retaining events for the recorder NAME in the broker; the lake is not changed."""

    async def ask(broker: Broker) -> bool:
        known = name in await broker.recorders()
        holder = (await broker.coordination.read_lease(recorder_lease(name))).holder
        if holder:
            raise LakeError(
                f"cannot forget recorder {name!r}: {holder} still records under this name; stop it first"
            )
        await broker.forget_recorder(name)
        return known

    known = ask_broker(app_name, ask, url=url)
    if as_json:
        print_json({"recorder": name, "forgotten": known})
    elif not known:
        click.echo(f"umbel: unknown recorder {name!r}; `umbel record status` lists them", err=True)
    return exits.OK if known else exits.NOT_FOUND


def _existing(lake: Lake) -> Lake:
    """Return the lake. Raise LakeError if it does not exist."""
    if not lake.store.is_there():
        raise LakeError(
            f"there is no lake at {lake.store.where}; record one with `umbel record`, or name another with"
            " --lake"
        )
    return lake


def _bytes(size: float) -> str:
    """Return a size in the largest suitable unit."""
    for unit in ("bytes", "KiB", "MiB"):
        if size < 1024:
            return f"{size:,.4g} {unit}"
        size /= 1024
    return f"{size:,.1f} GiB"
