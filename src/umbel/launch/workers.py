"""Workers: from an app and a command's flags to a worker that can run."""

import socket
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import time
from typing import TYPE_CHECKING, Any

from umbel.app.configuration.settings import Settings
from umbel.app.running.chord_parts import part_ended
from umbel.app.running.follow_ups import after_failure, keeps_result, steps_that_never_run
from umbel.app.running.request import Request, request_of
from umbel.app.sending.prepare import queue_of
from umbel.backends.registry import open_backend
from umbel.brokers.registry import open_broker
from umbel.errors import BadSetting, WireError
from umbel.launch.loading import FoundApp
from umbel.launch.pool_choice import ChildLogs, choose_pool
from umbel.protocol.delivery.delivery import TaskRules
from umbel.protocol.membership.mode import GossipMode
from umbel.wire.limits import is_name
from umbel.wire.message import Message, StoredResult
from umbel.wire.result import ExceptionMap, encode_failure, exception_map
from umbel.wire.task import TaskCall, decode_task, read_headers
from umbel.worker.settings import Ending, PeriodicTask, WorkerSettings
from umbel.worker.user_code.hook_queue import HookQueue
from umbel.worker.user_code.hooks import LifeHooks
from umbel.worker.worker import Worker

if TYPE_CHECKING:
    from umbel.app.app import App

MAILBOX = "umbel-mailbox"  # the connection of remote control, where it has its own


def make_worker(
    found: FoundApp,
    settings: Settings,
    *,
    node: str | None = None,
    run_directory: Path,
    loglevel: str = "WARNING",
    logfile: str | None = None,
    log_json: bool = False,
) -> Worker:
    """A worker for the app. Must be called on the event loop it will run on."""
    app = found.app
    name = node_name(node)
    of_broker = replace(settings.for_broker(), remembers_signatures=settings.keyring is not None)
    tasks = task_rules(app, settings)
    queues = settings.worker_queues or (settings.task_default_queue,)
    logs, served = ChildLogs(loglevel, logfile, log_json), tasks_for(app, tasks, queues)
    pool = choose_pool(settings, served, host=found.spec, node=name, logs=logs)
    worker_settings = WorkerSettings(
        node=name,
        queues=queues,
        tasks=tasks,
        end_without_running=Leftovers(app),
        run_directory=run_directory,
        lease_s=settings.lease_s,
        broker_connection_wait_s=settings.broker_connection_wait_s,
        prefetch_max=settings.worker_prefetch_max,
        max_deliveries=settings.task_max_deliveries,
        message_max_bytes=settings.message_max_bytes,
        signing_window_s=settings.signing_window_s,
        accept_unsigned=settings.accept_unsigned,
        heartbeat_interval_s=settings.heartbeat_interval_s,
        without_heartbeat=settings.without_heartbeat,
        without_mingle=settings.without_mingle,
        mingle_wait_s=settings.mingle_wait_s,
        without_gossip=settings.without_gossip,
        gossip_interval_s=settings.gossip_interval_s,
        gossip_mode=GossipMode(settings.gossip_mode),
        grace_s=settings.worker_grace_s,
        soft_grace_s=settings.worker_soft_grace_s,
        autoscale=settings.worker_autoscale,
        autoscale_cool_down_s=settings.worker_autoscale_cool_down_s,
        pool_restarts=settings.worker_pool_restarts,
        send_task_events=settings.task_send_events,
        history_lake=Path(settings.history_lake) if settings.worker_record else None,
        history_lake_mode=settings.lake_mode_bits(),
        control_mailbox=settings.control_mailbox,
        open_broker=lambda: open_broker(replace(of_broker, connection_name=MAILBOX)),
        control_allow=settings.control_allow,
        scheduler_lease_s=settings.scheduler_lease_s,
        election_protocol=settings.election_protocol,
        election_v1_compat=settings.election_v1_compat,
        shown_settings=settings.shown(),
        changed_settings=settings.changed(),
        hooks=life_hooks(app, name, settings.worker_hook_timeout_s),
        **written_by_users(app),
    )
    backend = open_backend(settings.backend, of_broker)
    return Worker(worker_settings, broker=open_broker(of_broker), backend=backend, pool=pool)


def written_by_users(app: "App") -> dict[str, Any]:
    """What the app's users wrote for its workers."""
    return {
        "app": app,
        "control_commands": app.panel,
        "election_handlers": app.topics.handlers,
        "periodic": periodic_tasks(app),
        "steps": tuple(app.steps),
        "node_hooks": app.signals.of_nodes(),
    }


def life_hooks(app: "App", node: str, timeout_s: float) -> LifeHooks:
    return LifeHooks(
        init=partial(app.signals.worker_init.send, node=node),
        ready=partial(app.signals.worker_ready.send, node=node),
        shutdown=partial(app.signals.worker_shutdown.send, node=node),
        timeout_s=timeout_s,
    )


def node_name(given: str | None) -> str:
    """`name@host`; a bare name gets this host, nothing gives `umbel@host`."""
    host = socket.gethostname()
    name = (given or "umbel").replace("%h", host)
    whole = name if "@" in name else f"{name}@{host}"
    before, _, after = whole.partition("@")
    if not before or not after or " " in whole or not whole.isprintable() or not is_name(whole):
        raise BadSetting("--hostname", given, "write it as name@host", source="the command line")
    return whole


def periodic_tasks(app: "App") -> dict[str, PeriodicTask]:
    return {one.name: PeriodicTask(one.entry, one.messages) for one in app.periodic_tasks}


def task_rules(app: "App", settings: Settings) -> dict[str, TaskRules]:
    """What the worker's main process must know of each task; the settings have the flags on top."""
    late = settings.task_acks_late
    return {
        name: TaskRules(
            acks_early=(not late) if task.options.acks_early is None else task.options.acks_early,
            rate_per_second=task.options.rate_per_second,
            hides=task.options.hides,
            soft_limit_s=task.options.soft_time_limit_s or settings.task_soft_time_limit_s,
            hard_limit_s=task.options.time_limit_s or settings.task_time_limit_s,
            is_async=task.is_async,
        )
        for name, task in app.all_tasks().items()
    }


def tasks_for(app: "App", tasks: Mapping[str, TaskRules], queues: Collection[str]) -> dict[str, TaskRules]:
    """Those that are sent to one of the queues, unless a call names another one."""
    known = app.all_tasks()
    return {
        name: rules for name, rules in tasks.items() if queue_of(app, name, known[name].options) in queues
    }


class Leftovers:
    """What a task leaves behind that never ran to its end: revoked, lost, unknown, timed out."""

    def __init__(self, app: "App") -> None:
        self._app = app
        # Errbacks that take the error itself are users' code: they run off the worker's loop, and one
        # that hangs does not keep the worker from ending.
        self._errbacks = HookQueue({"errback": lambda work: work()})

    def __call__(self, message: Message, queue: str, error: Exception, status: str) -> Ending:
        described = exception_map(error)
        done_at = time()
        headers = read_headers(message)
        results: list[StoredResult] = []
        if keeps_result(self._app, headers):
            results.append(encode_failure(headers.id, described, None, status=status, done_at=done_at))
        try:
            call = decode_task(message, accept=self._app.settings.accept_content)
        except WireError:
            return Ending(results)
        results += steps_that_never_run(call, described, "", status=status, done_at=done_at)
        request = request_of(call, hostname="", queue=queue)
        follow_ups = after_failure(self._app, call.embed.errbacks, request, error, "", run=self._run)
        if call.embed.chord is None and not call.embed.chain:
            return Ending(results, follow_ups)
        return Ending(results, follow_ups, lambda: self._count_part(call, request, status, described))

    def _count_part(self, call: TaskCall, request: Request, status: str, error: ExceptionMap) -> Ending:
        body = part_ended(self._app, call, request, status, error, run=self._run)
        return Ending(body.results, body.follow_ups)

    def _run(self, work: Callable[[], object]) -> None:
        self._errbacks.call("errback", work=work)
