"""An option or a task that the chosen pool cannot honour is refused at start, with the reason (F10)."""

from pathlib import Path
from typing import Any

import pytest

from umbel import App
from umbel.app.settings import override
from umbel.errors import BadSetting
from umbel.launch.preparation import ChildLogs, choose_pool
from umbel.launch.project import NativeProject
from umbel.launch.workers import tasks_for
from umbel.pools.abilities import ABILITIES, OPTIONS, lacks
from umbel.pools.interface import HostSpec, Pool

# A value other than the default for each option that asks something of a pool.
ASKED: dict[str, Any] = {
    "worker_child_start": "spawn",
    "worker_max_tasks_per_child": 10,
    "worker_max_memory_per_child": "100M",
    "worker_max_memory_hard": "100M",
    "worker_autoscale": [4, 2],
    "worker_gevent_children": 2,
}


def chosen(app: App, **flags: Any) -> Pool:
    settings = override(app.settings, **flags)
    host = HostSpec("nowhere:load", "app")
    project = NativeProject(app)
    served = tasks_for(project, project.task_rules(settings), settings.worker_queues or ("celery",))
    return choose_pool(settings, served, host=host, node="w@here", logs=ChildLogs())


@pytest.fixture
def plain(tmp_path: Path) -> App:
    app = App("tests", broker=f"sqlite:///{tmp_path}/never.db")
    app.task(name="plain")(lambda: None)
    return app


@pytest.fixture
def mixed(plain: App) -> App:
    async def sleep() -> None: ...

    plain.task(name="coroutine")(sleep)
    return plain


def test_every_option_that_may_be_refused_is_tried_here() -> None:
    assert set(ASKED) == set(OPTIONS)


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("pool", ABILITIES)
def test_an_option_is_honoured_or_refused_with_the_reason(plain: App, pool: str, option: str) -> None:
    reason = lacks(pool, OPTIONS[option])
    if not reason:
        chosen(plain, worker_pool=pool, **{option: ASKED[option]})
        return
    with pytest.raises(BadSetting) as refused:
        chosen(plain, worker_pool=pool, **{option: ASKED[option]})
    assert reason in str(refused.value)
    assert option in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("pool", ABILITIES)
def test_a_hard_limit_is_honoured_or_refused_with_the_reason(plain: App, pool: str) -> None:
    if not (reason := ABILITIES[pool].hard_limits):
        chosen(plain, worker_pool=pool, task_time_limit_s=5.0)
        return
    with pytest.raises(BadSetting, match="cannot enforce the time limit of plain") as refused:
        chosen(plain, worker_pool=pool, task_time_limit_s=5.0)
    assert reason in str(refused.value)


@pytest.mark.parametrize("pool", ABILITIES)
def test_a_soft_limit_is_honoured_or_refused_with_the_reason(plain: App, pool: str) -> None:
    if not ABILITIES[pool].soft_limits:
        chosen(plain, worker_pool=pool, task_soft_time_limit_s=5.0)
        return
    with pytest.raises(BadSetting, match="cannot enforce the time limit of plain"):
        chosen(plain, worker_pool=pool, task_soft_time_limit_s=5.0)


@pytest.mark.parametrize("pool", ABILITIES)
def test_async_tasks_run_or_are_refused_with_the_reason(mixed: App, pool: str) -> None:
    if not (reason := ABILITIES[pool].async_tasks):
        chosen(mixed, worker_pool=pool)
        return
    with pytest.raises(BadSetting, match="cannot run coroutine, which is async def") as refused:
        chosen(mixed, worker_pool=pool)
    assert reason in str(refused.value)


def test_only_tasks_of_the_queues_that_are_served_are_refused(mixed: App) -> None:
    mixed.task(name="crunch", time_limit=5, queue="cpu")(lambda: None)
    chosen(mixed, worker_pool="asyncio")
    chosen(mixed, worker_pool="asyncio", worker_queues=["io"])
    chosen(mixed, worker_pool="gevent", worker_queues=["io"])  # cannot run coroutines
    with pytest.raises(BadSetting, match="cannot enforce the time limit of crunch"):
        chosen(mixed, worker_pool="asyncio", worker_queues=["io", "cpu"])


def test_an_unknown_pool_is_one_clear_error(plain: App) -> None:
    with pytest.raises(BadSetting, match=r"must be one of prefork, .*solo") as refused:
        chosen(plain, worker_pool="gevnt")
    assert "'gevnt'" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_eventlet_is_refused_with_the_reason_and_what_to_use(plain: App) -> None:
    with pytest.raises(BadSetting, match=r"'eventlet'.*authors advise against it.*use gevent"):
        chosen(plain, worker_pool="eventlet")
