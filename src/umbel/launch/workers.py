"""Workers: from an app and a command's flags to a worker that can run."""

from collections.abc import Callable, Collection, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from umbel.app.settings import Settings
from umbel.brokers.interface import BrokerSettings
from umbel.brokers.registry import check_limits_on, open_async_producer, open_broker
from umbel.errors import BadSetting, ConfigurationError
from umbel.launch.loading import FoundApp
from umbel.launch.preparation import ChildLogs, choose_pool, node_name
from umbel.launch.project import NativeProject, Project
from umbel.pools.interface import Pool
from umbel.protocol.delivery.delivery import TaskRules
from umbel.protocol.membership.observers import GossipMode
from umbel.worker.context import OutboxSettings, WorkerSettings
from umbel.worker.sidecar import Sidecar
from umbel.worker.worker import Worker

if TYPE_CHECKING:
    from umbel.outbox.relay import TellSent

PORT_MAX = 65_535
MAILBOX = "umbel-mailbox"  # the connection of remote control, if it has a separate one
OUTBOX = "umbel-outbox"


def make_worker(
    found: FoundApp,
    settings: Settings,
    *,
    node: str | None = None,
    run_directory: Path,
    logs: ChildLogs = ChildLogs(),  # noqa: B008 (a tuple)
    project: Project | None = None,
    choose: Callable[..., Pool] = choose_pool,
    recorder: Sidecar | None = None,
) -> Worker:
    """Build a worker for the app. Must be called on the event loop on which the worker will run."""
    project, name = project or found.project or NativeProject(found.app), node_name(node)
    settings = project.begin(settings, name)
    of_broker = replace(project.for_broker(settings), remembers_signatures=settings.keyring is not None)
    tasks, queues = project.task_rules(settings), settings.worker_queues or (settings.task_default_queue,)
    _check_limits(tasks, of_broker)
    served = tasks_for(project, tasks, queues)
    pool = choose(settings, served, host=found.spec, node=name, logs=logs)
    worker_settings = WorkerSettings(
        node=name,
        queues=queues,
        tasks=tasks,
        end_without_running=project.end_without_running(),
        run_directory=run_directory,
        lease_s=settings.lease_s,
        broker_connection_wait_s=settings.broker_connection_wait_s,
        prefetch_max=settings.worker_prefetch_max,
        max_deliveries=settings.task_max_deliveries,
        message_max_bytes=settings.message_max_bytes,
        failed_keep_max_bytes=settings.failed_keep_max_bytes,
        accept_content=settings.accept_content,
        signing_window_s=settings.signing_window_s,
        unbound_s=settings.signing_window_s if settings.signing_accept_unbound else 0.0,
        learn_cluster=found.app.signing_cluster.learn,
        accept_unsigned=settings.accept_unsigned,
        grace_s=settings.worker_grace_s,
        soft_grace_s=settings.worker_soft_grace_s,
        autoscale=settings.worker_autoscale,
        autoscale_cool_down_s=settings.worker_autoscale_cool_down_s,
        pool_restarts=settings.worker_pool_restarts,
        log_successes=settings.worker_log_successes,
        control_mailbox=settings.control_mailbox,
        open_broker=lambda: open_broker(replace(of_broker, connection_name=MAILBOX)),
        control_allow=settings.control_allow,
        outbox=outbox_settings(settings, of_broker, found.app.sent_events.send),
        scheduler_lease_s=settings.scheduler_lease_s,
        election_protocol=settings.election_protocol,
        election_v1_compat=settings.election_v1_compat,
        recorder=recorder,
        shown_settings=settings.shown(),
        changed_settings=settings.changed(),
        hooks=project.life_hooks(name, settings.worker_hook_timeout_s),
        send_task_events=settings.task_send_events,
        metrics_address=metrics_address(settings.worker_metrics),
        **_cluster_settings(settings),
        **_code_of_users(settings, project.written_by_users(name)),
    )
    backend = project.open_backend(settings)
    return Worker(worker_settings, broker=open_broker(of_broker), backend=backend, pool=pool)


def outbox_settings(
    settings: Settings, of_broker: BrokerSettings, tell_sent: "TellSent"
) -> OutboxSettings | None:
    """Return the settings of the outbox relay; None if the app names no outbox."""
    if not settings.outboxes:
        return None
    from umbel.outbox.database import need_driver, parse_address  # few workers have an outbox
    from umbel.outbox.table import check_table

    addresses = tuple(map(parse_address, settings.outboxes))
    for address in addresses:
        need_driver(address)
    return OutboxSettings(
        addresses,
        check_table(settings.outbox_table),
        settings.outbox_poll_s,
        open_producer=lambda: open_async_producer(replace(of_broker, connection_name=OUTBOX)),
        tell_sent=tell_sent if settings.task_send_sent_event else None,
    )


def _check_limits(tasks: Mapping[str, TaskRules], broker: BrokerSettings) -> None:
    """Refuse cluster-wide limits that could not be enforced by this broker."""
    for name, rules in tasks.items():
        if rules.limit is None:
            continue
        check_limits_on(broker, name)
        if rules.limit.terms.most and rules.acks_before:
            raise ConfigurationError(
                f"task {name!r} has a limit of tasks at a time and acknowledges its messages early: such a "
                "message holds no slot; set acks_late=True for it, or use Rate"
            )


def _cluster_settings(settings: Settings) -> dict[str, Any]:
    """Return the settings of heartbeats, mingle and gossip."""
    return {
        "heartbeat_interval_s": settings.heartbeat_interval_s,
        "without_heartbeat": settings.without_heartbeat,
        "without_mingle": settings.without_mingle,
        "mingle_wait_s": settings.mingle_wait_s,
        "without_gossip": settings.without_gossip,
        "gossip_interval_s": settings.gossip_interval_s,
        "gossip_mode": GossipMode(settings.gossip_mode),
    }


def _code_of_users(settings: Settings, written: Mapping[str, Any]) -> dict[str, Any]:
    """Return what users wrote, without the schedule if this worker sends no periodic tasks."""
    left_out = {"periodic", "scheduler"} if settings.without_schedule else set()
    return {name: value for name, value in written.items() if name not in left_out}


def tasks_for(
    project: Project, tasks: Mapping[str, TaskRules], queues: Collection[str]
) -> dict[str, TaskRules]:
    """Return the tasks whose calls go to one of the queues, unless a call names another queue."""
    return {name: rules for name, rules in tasks.items() if project.queue_of(name) in queues}


def metrics_address(given: str) -> tuple[str, int] | None:
    """Return host and port of PORT or HOST:PORT; raises BadSetting. Without a host: this machine only."""
    if not given:
        return None
    host, _, port = given.rpartition(":")
    if not port.isdecimal() or int(port) > PORT_MAX:
        raise BadSetting(
            "worker_metrics", given, "it must be a port, or HOST:PORT", source="the worker's settings"
        )
    if find_spec("prometheus_client") is None:
        raise ConfigurationError("metrics need prometheus_client: pip install 'umbel[metrics]'")
    return host.strip("[]") or "127.0.0.1", int(port)
