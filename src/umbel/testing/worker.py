"""Worker: the app under test on an embedded broker, and a worker that runs its tasks in threads.

The worker claims, admits, runs and settles messages as any worker does. Its tasks run in threads of the
test's process, so they see the objects that the test has patched. Left out are: child processes (a task that
crashes ends the tests too, and hard time limits are not enforced), other nodes (no mingle, gossip or
heartbeats), and the schedule: `umbel_clock` sends periodic tasks, so that none runs in the middle of a test
by chance.
"""

import asyncio
import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, sleep
from typing import Any
from uuid import uuid4

import msgspec
from msgspec.structs import replace

from umbel.app.app import App, make_tracer
from umbel.app.definition import home_of
from umbel.app.options import Router
from umbel.app.running.tracer import Tracer
from umbel.app.settings import EMBEDDED_FILE, Settings, with_others
from umbel.app.task import Task
from umbel.brokers.registry import look_into
from umbel.errors import AppNotFound, UmbelError
from umbel.launch.loading import FoundApp, load_app
from umbel.launch.project import NativeProject, task_rules
from umbel.launch.workers import make_worker
from umbel.pools.abilities import ABILITIES
from umbel.pools.guard import Raised, call_guarded
from umbel.pools.interface import ChildContext, HostSpec, Job, Pool, PoolSettings, Runner
from umbel.pools.threads import ThreadsPool
from umbel.worker.user_code import LifeHooks
from umbel.worker.worker import Worker

# ---- the app under test ----------------------------------------------------------------------------

SOURCE = "umbel_settings"


@contextmanager
def embedded(app: App, directory: Path, **settings: Any) -> Iterator[App]:
    """Inside this block messages and results of the app are in a file in `directory`.

    `settings` override those of the app. Afterwards the settings are restored, connections are closed, and
    tasks that a test has defined in a function are removed.
    """
    before, known = (app.settings, app.router), frozenset(app.tasks)
    url = f"sqlite:///{directory.resolve() / EMBEDDED_FILE}"
    place = {"broker": url, "backend": url, "task_always_eager": False}
    changed = with_others(before[0], {**settings, **place}, source=SOURCE)
    app.close()
    app.settings = changed
    app.router = Router(app.settings.task_routes)
    try:
        yield app
    finally:
        app.close()
        app.settings, app.router = before
        for name in [
            task_name for task_name, task in app.tasks.items() if task_name not in known and _is_local(task)
        ]:
            del app.tasks[name]


def _is_local(task: Task[Any, Any]) -> bool:
    """Whether a task was defined in a function. Tasks of modules stay: a module is imported only once."""
    return "<locals>" in home_of(task.run)[1]


def app_under_test(target: str, directory: Path) -> App:
    """Load the app `module:attribute` as the tests import it; a new app if `target` is empty."""
    if not target:
        return App("tests")
    try:
        return load_app(target, str(directory))
    except AppNotFound as error:
        raise AppNotFound(f"umbel_app = {target} in pytest's settings: {error}") from error


# ---- the worker ------------------------------------------------------------------------------------

THREADS = 4
START_S, IDLE_S, STOP_S = 30.0, 30.0, 10.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.001, 0.02
_hosts: dict[str, "_Host"] = {}


class EmbeddedWorker:
    """Consumes all queues to which the app routes its tasks, and those to which it sends one meanwhile.

    It learns a task that is defined while it runs when the task is sent.
    """

    def __init__(self, app: App, directory: Path) -> None:
        self._app = app
        self._directory = directory
        self._settings = _settings(app)
        self._queues = set(self._settings.worker_queues)
        self._known = frozenset(app.all_tasks())
        self._worker: Worker | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ready = threading.Event()
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the worker in a thread, and wait until it is ready; UmbelError if it does not start."""
        self._ready.clear()
        self._error = None
        self._thread = threading.Thread(target=self._work, name="umbel-worker", daemon=True)
        self._thread.start()
        if not self._ready.wait(START_S):
            raise UmbelError(
                f"the test fixture umbel_worker did not start within {START_S:g} s; "
                "see the log that pytest captured"
            )
        if self._error is not None:
            raise UmbelError(f"the test fixture umbel_worker did not start: {self._error}") from self._error
        self._app.signals.before_task_publish.connect(self._prepare_for)

    def stop(self) -> None:
        """Stop the worker after its running tasks; UmbelError if it does not stop or had failed."""
        thread, loop, worker = self._thread, self._loop, self._worker
        if thread is None:
            return
        self._app.signals.before_task_publish.disconnect(self._prepare_for)
        if loop is not None and worker is not None and thread.is_alive():
            loop.call_soon_threadsafe(worker.request_stop)
        thread.join(STOP_S)
        if thread.is_alive():
            raise UmbelError(
                f"the test fixture umbel_worker did not stop within {STOP_S:g} s: a task is still running"
            )
        self._thread = self._worker = self._loop = None
        gc.unfreeze()  # a worker calls gc.freeze() when it is ready
        if self._error is not None:
            raise UmbelError(f"umbel_worker stopped because of an error: {self._error}") from self._error

    def wait_idle(self, timeout: float = IDLE_S) -> None:
        """Wait until every call that is due has run; UmbelError after `timeout` seconds."""
        ends, pause_s = monotonic() + timeout, FIRST_PAUSE_S
        look = look_into(self._app.broker_settings())
        try:
            while remaining := look.left(self._queues):
                if self._error is not None:
                    raise UmbelError(
                        f"umbel_worker stopped because of an error: {self._error}"
                    ) from self._error
                if monotonic() >= ends:
                    raise UmbelError(f"umbel_worker still has {remaining} tasks to run after {timeout:g} s")
                sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        finally:
            look.close()

    def _prepare_for(self, *, task: str, queue: str, **_context: object) -> None:
        """Learn a new task or queue in the sending thread, before the message can be claimed."""
        new = {task} & self._app.tasks.keys() - self._known
        if self._worker is not None and (new or queue not in self._queues):
            rules = task_rules(self._app, self._settings)
            self._worker.learn({name: rules[name] for name in new}, [queue])
            self._queues.add(queue)
            self._known |= new

    # -- for the clock ---------------------------------------------------------------------------

    def next_due(self) -> float | None:
        """The time at which the next message is due; None if none waits."""
        look = look_into(self._app.broker_settings())
        try:
            return look.next_due()
        finally:
            look.close()

    def catch_up(self) -> None:
        """Wait until every call that is due has run."""
        self.wait_idle()

    # -- in its thread ---------------------------------------------------------------------------

    def _work(self) -> None:
        ended = call_guarded(asyncio.run, self._run())
        if isinstance(ended, Raised):
            self._error = ended.error  # the test's thread raises it
        self._ready.set()

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        token = uuid4().hex
        _hosts[token] = _Host(self._app)
        try:
            self._worker = make_worker(
                FoundApp(self._app, HostSpec(f"{__name__}:find_host", token)),
                self._settings,
                node="tests",
                run_directory=self._directory,
                project=_Project(self._app, self._ready.set),
                choose=_pool,
            )
            await self._worker.run()
        finally:
            del _hosts[token]


def find_host(token: str) -> "_Host":
    """Look up the host of an app by its token, for the pool: the app need not be importable."""
    return _hosts[token]


class _Host:
    """The app as the pool sees it. The test configures logging and closes the app's connections."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._tracer: Tracer | None = None
        self._node = ""

    def start_child(self, context: ChildContext) -> Runner:
        self._node, self._tracer = context.node, make_tracer(self._app, context)
        self._app.signals.worker_process_init.send(node=context.node, child=context.child)
        return self._tracer

    def stop_child(self) -> None:
        self._app.signals.worker_process_shutdown.send(node=self._node)
        if self._tracer is not None:
            self._tracer.close()


class _Project(NativeProject):
    def __init__(self, app: App, on_ready: Callable[[], object]) -> None:
        super().__init__(app)
        self._on_ready = on_ready

    def life_hooks(self, node: str, timeout_s: float) -> LifeHooks:
        hooks = super().life_hooks(node, timeout_s)

        def ready() -> None:
            try:
                hooks.ready()
            finally:
                self._on_ready()

        return replace(hooks, ready=ready)


class _Threads(ThreadsPool):
    """A pool of threads that ignores hard time limits, which threads cannot enforce, instead of refusing
    them.
    """

    def __init__(self, settings: PoolSettings) -> None:
        super().__init__(settings)
        self.abilities = replace(ABILITIES[self.name], hard_limits="", async_hard_limits="")

    def submit(self, jobs: Sequence[Job]) -> None:
        super().submit([msgspec.structs.replace(job, hard_limit_s=None) for job in jobs])


def _pool(settings: Settings, *_tasks: object, host: HostSpec, node: str, **_logs: object) -> Pool:
    return _Threads(PoolSettings(host, node, settings.worker_concurrency or THREADS))


def _settings(app: App) -> Settings:
    asked = app.settings.worker_queues
    settings = {
        "worker_queues": asked or tuple(sorted(app.task_queues())),
        "worker_grace_s": min(app.settings.worker_grace_s, STOP_S / 4),
        "worker_soft_grace_s": min(app.settings.worker_soft_grace_s, STOP_S / 4),
        "worker_record": False,
        "without_mingle": True,
        "without_gossip": True,
        "without_heartbeat": True,
        "without_schedule": True,
    }
    return with_others(app.settings, settings, source="umbel_worker")
