import subprocess
import sys
from functools import partial
from pathlib import Path
from time import time
from typing import Any

import pytest

from tests.app.test_tracer import job_of
from umbel import App, Task
from umbel.app.running.tracer import Tracer
from umbel.app.task import AsyncTask
from umbel.errors import ConfigurationError
from umbel.wire.call import read_headers
from umbel.wire.message import parse_instant


def pack(box: str, count: int = 1) -> str:
    """Pack things."""
    return box * count


async def pack_async(box: str) -> str:
    return box


# -- names -----------------------------------------------------------------------------------------


def test_a_task_is_named_after_its_module_and_function(app: App) -> None:
    task = app.task(pack)
    assert task.name == f"{__name__}.pack"
    assert app.tasks == {task.name: task}


def test_the_request_of_a_direct_call_does_not_say_whether_its_result_is_ignored(app: App) -> None:
    assert app.task(pack).request.ignore_result is None


def test_a_task_may_be_given_a_name(app: App) -> None:
    assert app.task(name="parcels.pack")(pack).name == "parcels.pack"


SCRIPT = """
from umbel import App

app = App("typed")

@app.task
def pack() -> None: ...

print(*app.tasks)
"""


def run_python(*arguments: str, cwd: Path, stdin: str = "") -> str:
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, input=stdin, capture_output=True, text=True, check=True, cwd=cwd, timeout=60
    ).stdout


def test_a_task_of_a_script_has_the_name_it_is_imported_by_elsewhere(tmp_path: Path) -> None:
    package = tmp_path / "shop"
    package.mkdir()
    (package / "parcels.py").write_text(SCRIPT)
    assert run_python("shop/parcels.py", cwd=tmp_path) == "parcels.pack\n"
    assert run_python("-m", "shop.parcels", cwd=tmp_path) == "shop.parcels.pack\n"


def test_a_task_typed_into_the_interpreter_has_the_name_of_its_app(tmp_path: Path) -> None:
    assert run_python("-c", SCRIPT, cwd=tmp_path) == "typed.pack\n"
    assert run_python(cwd=tmp_path, stdin=SCRIPT) == "typed.pack\n"


def test_two_functions_cannot_share_a_name(app: App) -> None:
    app.task(name="pack")(pack)
    with pytest.raises(ConfigurationError, match="two tasks are named 'pack'"):
        app.task(name="pack")(pack_async)


def test_the_same_function_defined_again_replaces_the_old_one(app: App) -> None:
    first, second = app.task(pack), app.task(pack)
    assert app.tasks[second.name] is second is not first


def test_a_function_without_a_name_wants_one(app: App) -> None:
    with pytest.raises(ConfigurationError, match="give the task one with name="):
        app.task(partial(pack, count=2))
    task = app.task(name="pack_two")(partial(pack, count=2))
    assert task("ab") == "abab"


def test_a_task_keeps_what_describes_its_function(app: App) -> None:
    task = app.task(pack)
    assert (task.__name__, task.__doc__) == ("pack", "Pack things.")  # type: ignore[attr-defined]
    assert repr(task) == f"<task {__name__}.pack>"


def test_an_app_counts_its_tasks(app: App) -> None:
    app.task(pack)
    assert repr(app) == "<App tests with 1 tasks>"


# -- options ---------------------------------------------------------------------------------------


def test_without_options_the_apps_settings_will_decide(app: App) -> None:
    options = app.task(pack).options
    assert (options.bind, options.queue, options.priority, options.acks_early) == (False, None, None, None)
    assert (options.retry.max_retries, options.retry.delay_s, options.rate_per_second) == (3, 180.0, 0.0)


def test_options_are_kept_with_the_task(app: App) -> None:
    options = app.task(
        queue="slow",
        priority=3,
        acks_early=True,
        ignore_result=True,
        autoretry_for=(OSError,),
        max_retries=None,
        default_retry_delay=5,
        retry_backoff=True,
        retry_backoff_max=60.0,
        retry_jitter=False,
        rate_limit="6/m",
        time_limit=10.0,
        soft_time_limit=8.0,
        serializer="msgpack",
        track_started=True,
    )(pack).options
    assert (options.queue, options.priority, options.serializer) == ("slow", 3, "msgpack")
    assert (options.acks_early, options.ignore_result, options.track_started) == (True, True, True)
    assert (options.time_limit_s, options.soft_time_limit_s, options.rate_per_second) == (10.0, 8.0, 0.1)
    assert options.autoretry_for == (OSError,)
    policy = options.retry
    assert (policy.max_retries, policy.delay_s, policy.backoff_s) == (None, 5, 1.0)
    assert (policy.backoff_max_s, policy.jitter) == (60.0, False)


def test_an_unknown_option_is_refused_with_the_nearest(app: App) -> None:
    define: Any = app.task
    with pytest.raises(TypeError, match=r"unknown option 'max_retrys' of task '.*pack'.*'max_retries'"):
        define(max_retrys=3)(pack)


@pytest.mark.parametrize(
    ("late", "early", "acks_early"),
    [
        (None, None, None),
        (True, None, False),
        (False, None, True),
        (None, True, True),
        (None, False, False),
        (True, False, False),
        (False, True, True),
    ],
)
def test_late_and_early_acks_are_two_names_for_one_choice(
    app: App, late: bool | None, early: bool | None, acks_early: bool | None
) -> None:
    define: Any = app.task
    assert define(acks_late=late, acks_early=early)(pack).options.acks_early is acks_early


@pytest.mark.parametrize("both", [True, False])
def test_late_and_early_acks_cannot_both_be(app: App, both: bool) -> None:
    with pytest.raises(
        ConfigurationError, match=rf"'.*pack' has both acks_late={both} and acks_early={both}"
    ):
        app.task(acks_late=both, acks_early=both)(pack)


@pytest.mark.parametrize("rate", ["10/d", "fast", "-1/s", "", -1.0])
def test_a_rate_that_is_none_is_refused_with_the_task(app: App, rate: str | float) -> None:
    with pytest.raises(ConfigurationError, match=r"rate_limit of task '.*pack': .* is not a rate"):
        app.task(rate_limit=rate)(pack)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("priority", 10),
        ("priority", -1),
        ("priority", "high"),
        ("priority", True),
        ("queue", 3),
        ("max_retries", "3"),
        ("max_retries", -1),
        ("default_retry_delay", -1.0),
        ("retry_backoff", "yes"),
        ("time_limit", "10"),
        ("time_limit", 0),
        ("soft_time_limit", -2.0),
        ("serializer", "yaml"),
        ("autoretry_for", OSError),
        ("autoretry_for", ("OSError",)),
        ("ignore_result", "no"),
    ],
)
def test_an_ill_typed_option_is_refused_with_its_value(app: App, option: str, value: object) -> None:
    define: Any = app.task
    with pytest.raises(ConfigurationError) as caught:
        define(**{option: value})(pack)
    assert f"option {option!r} of task '{__name__}.pack' is {value!r}" in str(caught.value)
    assert app.tasks == {}


def test_an_option_that_is_none_counts_as_not_given(app: App) -> None:
    define: Any = app.task
    plain, none = define(pack).options, define(queue=None, retry_backoff=None, rate_limit=None)(pack).options
    assert plain == none


# -- calling it as a function ----------------------------------------------------------------------


def test_a_task_can_be_called_as_the_function_it_was(app: App) -> None:
    assert app.task(pack)("ab", count=2) == "abab"


def test_a_bound_task_called_as_a_function_gets_itself_and_an_empty_request(app: App) -> None:
    @app.task(bind=True)
    def look(self: Task[..., Any], what: str) -> tuple[str, str, bool]:
        return self.name, self.request.id + what, self.request.called_directly

    assert look("x") == (look.name, "x", True)


def test_an_async_task_called_as_a_function_gives_its_coroutine(app: App) -> None:
    task = app.task(pack_async)
    assert isinstance(task, AsyncTask)
    coroutine = task("ab")
    with pytest.raises(StopIteration) as ended:
        coroutine.send(None)
    assert ended.value.value == "ab"


def test_a_bound_task_needs_a_first_parameter(app: App) -> None:
    define: Any = app.task

    def nothing() -> None: ...
    def only_named(*, named: int) -> None: ...

    for function in (nothing, only_named):
        with pytest.raises(ConfigurationError, match=r"bind=True.*no first parameter"):
            define(bind=True)(function)


# -- options as attributes -------------------------------------------------------------------------


def test_what_was_said_of_a_task_can_be_read(app: App) -> None:
    plain = app.task(name="plain")(pack)
    assert (plain.max_retries, plain.default_retry_delay, plain.rate_limit, plain.typing) == (
        3,
        180.0,
        None,
        True,
    )
    said: dict[str, Any] = {
        "queue": "slow",
        "priority": 3,
        "acks_late": False,
        "ignore_result": True,
        "autoretry_for": (OSError,),
        "dont_autoretry_for": (BlockingIOError,),
        "retry_kwargs": {"max_retries": 1},
        "max_retries": None,
        "default_retry_delay": 5.0,
        "retry_backoff": 2.0,
        "retry_backoff_max": 9.0,
        "retry_jitter": False,
        "throws": (KeyError,),
        "rate_limit": "10/s",
        "time_limit": 9.0,
        "soft_time_limit": 8.0,
        "expires": 60.0,
        "serializer": "json",
        "track_started": True,
        "typing": False,
    }
    task = app.task(name="said", **said)(pack)
    assert {name: getattr(task, name) for name in said} == said


def test_a_task_makes_its_signatures_and_results(app: App) -> None:
    task = app.task(name="pack")(pack)
    made = task.signature(("box",), {"count": 2}, immutable=True, queue="slow")
    assert (
        made
        == task.si("box", count=2).set(queue="slow")
        == task.subtask(("box",), {"count": 2}, True, queue="slow")
    )
    assert task.AsyncResult("t") == app.AsyncResult("t")
    with app.eager():
        assert task.backend is app.backend


def test_a_task_without_typing_is_sent_with_any_arguments(app: App) -> None:
    task: Any = app.task(name="pack", typing=False)(pack)
    assert app.prepare("pack", (1, 2, 3), {}, {}).task == "pack"
    with app.eager(), pytest.raises(TypeError, match="takes from 1 to 2 positional arguments but 3"):
        task.delay(1, 2, 3).get()


def test_a_task_may_expire_by_itself(app: App) -> None:
    app.task(name="pack", expires=60)(pack)
    message = app.prepare("pack", ("box",), {}, {}).outgoing.message
    left_s = parse_instant(read_headers(message).expires or "") - time()
    assert 50 < left_s <= 61
    assert message.expiration_ms is not None and 50_000 < message.expiration_ms <= 60_000
    sooner = app.prepare("pack", ("box",), {}, {"expires": 5}).outgoing.message
    assert sooner.expiration_ms is not None and sooner.expiration_ms <= 5_000


def test_errors_that_a_task_throws_are_expected(app: App) -> None:
    def lose(key: str) -> None:
        raise {"key": KeyError, "value": ValueError}[key](key)

    app.task(name="lose", throws=(KeyError,))(lose)
    tracer = Tracer(app, hostname="w@host")
    assert [tracer(job_of(app, "lose", key)).expected for key in ("key", "value")] == [True, False]
