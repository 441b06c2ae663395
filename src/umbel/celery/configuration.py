"""Configuration: a Celery app's settings, as far as they are about the worker, as ours."""

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from umbel.app.app import App
from umbel.app.configuration.settings import Settings
from umbel.errors import BadSetting
from umbel.urls import without_password

SOURCE = "the Celery app's configuration"
POOLS: Mapping[str, str] = {
    "prefork": "prefork",
    "processes": "prefork",
    "solo": "solo",
    "threads": "threads",
    "gevent": "gevent",
}
OURS = ("redis", "rediss", "unix", "rpc", "sqlite")  # result backends that Umbel speaks itself
NAMES_OF_REDIS = {"redis+socket": "unix"}


def settings_of(app: Any) -> Settings:
    return app_for(app).settings


def app_for(app: Any) -> App:
    """An `umbel.App` that stands for the Celery app in commands: same broker, results and names."""
    known = getattr(app, "umbel_app", None)
    if isinstance(known, App):
        return known
    conf = app.conf
    given: dict[str, Any] = {
        "broker": broker_url(app),
        "backend": backend_url(app),
        "task_default_queue": conf.task_default_queue,
        "accept_content": tuple(conf.accept_content),
        "task_ignore_result": conf.task_ignore_result,
        "task_acks_late": conf.task_acks_late,
        "task_time_limit_s": conf.task_time_limit,
        "task_soft_time_limit_s": conf.task_soft_time_limit,
        "task_send_sent_event": conf.task_send_sent_event,
        "task_send_events": conf.worker_send_task_events,
        "result_expires_s": seconds(conf.result_expires),
        "result_extended": conf.result_extended,
        "worker_concurrency": conf.worker_concurrency or None,
        "worker_pool": pool_of(conf.worker_pool),
        "worker_max_tasks_per_child": conf.worker_max_tasks_per_child,
        "worker_max_memory_per_child": conf.worker_max_memory_per_child,
        "worker_pool_restarts": conf.worker_pool_restarts,
        "connect_timeout_s": conf.broker_connection_timeout,
    }
    made = App(app.main or "celery", **{name: value for name, value in given.items() if value is not None})
    app.umbel_app = made
    return made


def broker_url(app: Any) -> str:
    """Where messages are; of several addresses the first."""
    conf = app.conf
    stated = conf.broker_read_url or conf.broker_url
    url = (
        stated[0] if isinstance(stated, list | tuple) else (stated or app.connection_for_read().as_uri(True))
    )
    first = str(url).split(";")[0]
    scheme = first.partition(":")[0]
    return first.replace(scheme, NAMES_OF_REDIS[scheme], 1) if scheme in NAMES_OF_REDIS else first


def backend_url(app: Any) -> str:
    """The address of the results where Umbel stores them itself; else "", and Celery's backend does."""
    stated = app.conf.result_backend or ""
    url = str(stated)
    scheme = url.partition(":")[0]
    if scheme in NAMES_OF_REDIS:
        return url.replace(scheme, NAMES_OF_REDIS[scheme], 1)
    return url if scheme in OURS else ""


def pool_of(stated: Any) -> str:
    name = str(stated).rpartition(":")[0].rpartition(".")[2] if ":" in str(stated) else str(stated)
    if name == "eventlet":
        return name  # refused by the settings, with the reason
    if name not in POOLS:
        raise BadSetting("worker_pool", stated, f"choose {', '.join(sorted(POOLS))}", source=SOURCE)
    return POOLS[name]


def seconds(stated: timedelta | float | None) -> float:
    """A duration as Celery's users write it; None is for ever, which a hundred years are to us."""
    if stated is None:
        return 100 * 365 * 86_400.0
    return stated.total_seconds() if isinstance(stated, timedelta) else float(stated)


def shown_backend(app: Any) -> str:
    return without_password(str(app.conf.result_backend or "disabled://"))
