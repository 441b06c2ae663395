"""`umbel dev`: run a worker for development, which restarts when the code changes.

The worker is a separate process, because reloading modules in a process leaves old objects behind. It shuts
down like any worker: running tasks may finish within a short time, and are requeued otherwise. If the code
cannot be imported, the worker exits with an error and restarts at the next change.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path

import click

from umbel.cli import exits
from umbel.cli.history.lake import LakePlace
from umbel.cli.options import app_option
from umbel.history.lake import can_record
from umbel.stores.interface import Where
from umbel.worker.sidecar import sidecar_command

LOOK_EVERY_S = 0.3
FILES_MAX = 20_000
GRACE_S = 3.0
STOP_S = 10.0
PASSED_OVER = frozenset({"__pycache__", "node_modules", "site-packages", "build", "dist", "umbel-lake"})
WATCHED = (".py", ".toml", ".env")
Files = Mapping[Path, int]


@click.command("dev")
@app_option
@click.option("-c", "--concurrency", type=click.IntRange(1), default=2, show_default=True)
@click.option(
    "--record/--no-record", default=None, help="Record history; default: yes if umbel[history] is installed."
)
@click.option(
    "--web/--no-web", default=None, help="Serve the dashboard; default: yes if umbel[web] is installed."
)
@click.option("--web-port", type=click.IntRange(0, 65_535), default=5555, show_default=True)
@click.option(
    "--lake",
    metavar="PLACE",
    envvar="UMBEL_HISTORY_LAKE",
    type=LakePlace(),
    help="Folder or s3://bucket/prefix of the history; default: history_lake, else umbel-lake.",
)
def command(
    app_name: str | None,
    concurrency: int,
    record: bool | None,
    web: bool | None,
    web_port: int,
    lake: Where | None,
) -> int:
    """Run a worker that restarts when the code changes, with the embedded broker and periodic tasks.

    Finds the app in ./tasks.py or ./app.py. Press Ctrl-C to stop.
    """
    flags = ["-c", str(concurrency), "--grace", str(GRACE_S), "-E"]
    # Log each task that ran. The child processes of a Celery project already do so at INFO.
    environment = {"UMBEL_WORKER_LOG_SUCCESSES": "true", "UMBEL_LOG_LEVEL": "info", **os.environ}
    if record is not None or can_record():
        environment["UMBEL_WORKER_RECORD"] = "false" if record is False else "true"
    if lake is not None:
        environment["UMBEL_HISTORY_LAKE"] = str(lake)
    _say(f"watching {Path.cwd()}")
    _say("send a task from another terminal: umbel call NAME; press Ctrl-C to stop")
    is_shown = web if web is not None else find_spec("uvicorn") is not None
    dashboard = sidecar_command("web", app_name, "--port", str(web_port)) if is_shown else None
    dev = Dev(Path.cwd(), [*(["-A", app_name] if app_name else []), *flags], environment, dashboard)
    # SIGTERM and a closed terminal have the same effect as Ctrl-C.
    for signum in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.default_int_handler)
    try:
        dev.run()
    except KeyboardInterrupt:
        _say("stopping")
    finally:
        dev.close()
    return exits.OK


class Dev:
    """Runs the worker and the dashboard, and restarts the worker when files change.

    `dashboard` is the command that serves the dashboard. It does not restart with the worker, so that users
    stay logged in.
    """

    def __init__(
        self,
        folder: Path,
        arguments: list[str],
        environment: Mapping[str, str],
        dashboard: list[str] | None = None,
    ) -> None:
        self._folder, self._environment = folder, environment
        self._dashboard = dashboard
        self._web: subprocess.Popen[bytes] | None = None
        self._command = [sys.executable, "-m", "umbel.cli.main", "worker", *arguments]
        self._worker: subprocess.Popen[bytes] | None = None

    def run(self) -> None:
        """Start the worker, and restart it at each change, until Ctrl-C."""
        known = files_in(self._folder)
        self._start()
        while True:
            time.sleep(LOOK_EVERY_S)
            self._look_after()
            now = files_in(self._folder)
            changed = changes(known, now)
            if changed:
                known = self._settled(now)
                _say(f"{', '.join(map(str, changed[:3]))} changed: restarting")
                self.stop()
                self._start()

    def stop(self) -> None:
        """Stop the worker with SIGTERM, then with stronger signals. Another Ctrl-C sends the next signal at
        once.
        """
        worker, self._worker = self._worker, None
        if worker is None:
            return
        for signum in (signal.SIGTERM, signal.SIGTERM, signal.SIGQUIT, signal.SIGKILL):
            if worker.poll() is None:
                worker.send_signal(signum)
            try:
                worker.wait(timeout=GRACE_S if signum == signal.SIGTERM else STOP_S)
            except (subprocess.TimeoutExpired, KeyboardInterrupt):
                continue
            return

    def close(self) -> None:
        """Stop the worker and the dashboard."""
        self.stop()
        if self._web is not None:
            self._web.terminate()
            try:
                self._web.wait(timeout=STOP_S)
            except subprocess.TimeoutExpired:
                self._web.kill()

    def _start(self) -> None:
        """Start the worker, and the dashboard if it is not running."""
        if self._dashboard is not None and (self._web is None or self._web.poll() is not None):
            self._web = subprocess.Popen(
                self._dashboard,
                cwd=self._folder,
                env=self._environment,
                stdin=subprocess.PIPE,  # the dashboard exits when this pipe closes
                process_group=0,
            )
        # In a separate process group, Ctrl-C reaches only this process, so the worker gets one signal.
        self._worker = subprocess.Popen(
            self._command,
            cwd=self._folder,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            process_group=0,
        )

    def _look_after(self) -> None:
        """Report a worker or dashboard that has exited."""
        if self._web is not None and self._web.poll() is not None and self._web.returncode:
            _say(f"the dashboard exited with code {self._web.returncode}; it restarts at the next change")
            self._web = None
        if self._worker is not None and self._worker.poll() is not None:
            _say(f"the worker exited with code {self._worker.returncode}; it restarts at the next change")
            self._worker = None

    def _settled(self, found: Files) -> Files:
        """Wait until files stop changing, because an editor or a checkout writes many of them."""
        while True:
            time.sleep(LOOK_EVERY_S)
            now = files_in(self._folder)
            if now == found:
                return now
            found = now


def files_in(folder: Path) -> Files:
    """Return the project's source files and the time of their last change; at most FILES_MAX files."""
    found: dict[Path, int] = {}
    for path, stat in _walk(folder):
        found[path.relative_to(folder)] = stat.st_mtime_ns
        if len(found) >= FILES_MAX:
            break
    return found


def changes(before: Files, after: Files) -> list[Path]:
    """Return the files that were changed, added or removed."""
    return sorted(path for path in before.keys() | after.keys() if before.get(path) != after.get(path))


def _walk(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Yield the source files below a folder. Hidden folders, environments and build results are skipped."""
    try:
        entries = list(os.scandir(folder))
    except OSError:  # the folder was removed, or is not readable
        return
    for entry in entries:
        if entry.name.startswith(".") and entry.name != ".env":
            continue
        try:
            if entry.is_dir(follow_symlinks=False):
                is_environment = Path(entry.path, "pyvenv.cfg").exists()
                if entry.name not in PASSED_OVER and not is_environment:
                    yield from _walk(Path(entry.path))
            elif entry.name.endswith(WATCHED):
                yield Path(entry.path), entry.stat()
        except OSError:
            continue


def _say(text: str) -> None:
    """Print a line of `umbel dev` on stderr."""
    click.echo(f"umbel dev: {text}", err=True)
