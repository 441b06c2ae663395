"""States and results: ignored, tracked, set by hand, rejected; trees and groups of results; eager calls."""

from typing import Any

from celery import chain, group
from celery.result import GroupResult, result_from_tuple

from tests.celery_apps.asking import (
    all_ended,
    case,
    ended,
    everywhere,
    got,
    is_in_state,
    journal,
    last_of_traceback,
    new_key,
    open_gate,
    stays_pending,
    waited,
)
from tests.celery_apps.project import tasks
from tests.celery_apps.project.canvas_tasks import retries
from tests.celery_apps.project.celery import app
from tests.celery_apps.project.tasks import add, echo, fail, mul


@everywhere(quick=True)
def result_of_a_task() -> Any:
    result = add.delay(1, 2)
    return [got(result), result.state, result.successful(), result.failed(), result.traceback]


@everywhere(quick=True)
def failure_of_a_task() -> Any:
    result = fail.delay("as expected")
    return [got(result), ended(result), last_of_traceback(result)]


@everywhere()
def nothing_as_a_result() -> Any:
    return ended(tasks.nothing.delay())


@case()
def throws_what_it_said() -> Any:
    return ended(tasks.fail_known.delay())


@case(quick=True)
def result_is_ignored() -> Any:
    key = new_key()
    result = tasks.ignored.delay(key)
    return [journal(key, 1), stays_pending(result)]


@case()
def result_is_ignored_by_the_call() -> Any:
    key = new_key()
    result = tasks.write.apply_async((key, "ran"), ignore_result=True)
    return [journal(key, 1), stays_pending(result)]


@case()
def result_is_kept_by_the_call() -> Any:
    return ended(tasks.ignored.apply_async((new_key(),), ignore_result=False))


@case(setups=("main", "late"))
def failure_is_ignored() -> Any:
    key = new_key()
    result = tasks.ignored_failure.delay(key)
    return [journal(key, 1), stays_pending(result)]


@case(quick=True)
def failure_is_stored_although_ignored() -> Any:
    return ended(tasks.seen_failure.delay())


@everywhere(quick=True)
def state_started() -> Any:
    gate = new_key()
    result = tasks.tracked.delay(gate)
    seen = is_in_state(result, "STARTED") if app.conf.result_backend != "rpc://" else ["STARTED", {}]
    open_gate(gate)
    return [seen[0], sorted(seen[1]), ended(result)]


@case(quick=True, setups=("main", "late", "database", "files", "cache", "django"))
def state_of_the_users_own() -> Any:
    gate = new_key()
    result = tasks.reports.delay(gate)
    seen = is_in_state(result, "PROGRESS")
    open_gate(gate)
    return [seen, ended(result)]


@case()
def state_set_by_hand_stays() -> Any:
    result = tasks.sets_state_and_ignores.delay("SPECIAL")
    return is_in_state(result, "SPECIAL")


@case()
def end_set_by_hand_stays() -> Any:
    result = tasks.sets_state_and_ignores.delay("SUCCESS")
    return ended(result)


@case(quick=True)
def task_ignores() -> Any:
    return stays_pending(tasks.ignores.delay())


@case()
def task_that_ignores_in_a_chain() -> Any:
    result = chain(tasks.ignores.si(), add.si(1, 1)).delay()
    return [stays_pending(result.parent), stays_pending(result)]


@case(quick=True)
def task_rejects() -> Any:
    key = new_key()
    result = tasks.rejects.delay(key)
    return [ended(result), journal(key, 1)]


@case()
def task_rejects_early() -> Any:
    key = new_key()
    result = tasks.rejects_early.delay(key)
    return [ended(result), journal(key, 1)]


@case(quick=True)
def task_requeues() -> Any:
    key = new_key()
    result = tasks.requeues.delay(key)
    return [ended(result), journal(key, 2)]


@case()
def task_requeues_too_late() -> Any:
    key = new_key()
    result = tasks.requeues_early.delay(key)
    journal(key, 1)
    return [stays_pending(result), journal(key, 1)]


@case()
def task_that_rejects_in_a_chain() -> Any:
    result = chain(tasks.rejects.si(new_key()), add.si(1, 1)).delay()
    return [ended(result.parent), stays_pending(result)]


@case(setups=("late", "django"))
def extended_result() -> Any:
    result = echo.apply_async((1, 2), {"a": 3}, queue="urgent")
    got(result)
    seen = app.AsyncResult(result.id)
    return [
        seen.name,
        list(seen.args or []),
        seen.kwargs,
        seen.worker,
        seen.retries,
        seen.queue,
        seen.date_done is not None,
    ]


@case(setups=("late", "django"))
def extended_failure() -> Any:
    result = fail.delay("with its name")
    ended(result)
    seen = app.AsyncResult(result.id)
    return [seen.name, list(seen.args or []), seen.kwargs, seen.worker, seen.retries, seen.queue]


@case(setups=("late",))
def extended_retry() -> Any:
    result = retries.delay(new_key(), 2)
    got(result)
    seen = app.AsyncResult(result.id)
    return [seen.name, seen.retries, seen.worker]


@case(setups=("main", "late"))
def stored_bytes() -> Any:
    result = add.delay(1, 2)
    got(result)
    meta = dict(app.backend.get_task_meta(result.id))
    return {name: value if name != "date_done" else type(value).__name__ for name, value in meta.items()}


@case()
def stored_failure() -> Any:
    result = chain(fail.si("stored"), add.s(1)).delay()
    got(result)
    meta = dict(app.backend.get_task_meta(result.parent.id))
    return [sorted(meta), meta["status"], repr(meta["result"]), meta["children"], "parent_id" in meta]


@case(quick=True)
def children_of_a_task() -> Any:
    key = new_key()
    result = tasks.sends.delay(key)
    value = got(result)
    return [value, [got(child) for child in result.children], journal(key, 1)]


@case()
def children_without_a_trail() -> Any:
    result = tasks.sends_without_trail.delay()
    return [got(result), result.children]


@case()
def collected_results() -> Any:
    result = add.apply_async((1, 1), link=mul.s(10))
    return [value for _, value in result.collect(timeout=60)]


@case()
def graph_of_results() -> Any:
    result = chain(add.s(1, 1), mul.s(2)).delay()
    got(result)
    first = app.AsyncResult(result.parent.id)
    return [[state.state for state, _ in first.iterdeps()], result.parent.get(), len(list(first.iterdeps()))]


@case()
def parents_of_a_chain() -> Any:
    result = chain(add.s(1, 1), mul.s(2), add.s(3)).delay()
    got(result)
    return [result.parent.get(), result.parent.parent.get(), result.parent.parent.parent]


@everywhere(quick=True)
def group_result_saved_and_restored() -> Any:
    result = group(add.s(1, 1), add.s(2, 2)).delay()
    if app.conf.result_backend == "rpc://":
        return got(result)
    result.save()
    restored = GroupResult.restore(result.id, app=app)
    return [got(restored), restored.successful(), restored.completed_count(), len(restored)]


@case()
def group_result_joined() -> Any:
    result = group(add.s(1, 1), add.s(2, 2)).delay()
    return [result.join(timeout=60), result.join_native(timeout=60)]


@case()
def group_result_with_callback() -> Any:
    seen: list[Any] = []
    result = group(add.s(1, 1), add.s(2, 2)).delay()
    result.join(timeout=60, callback=lambda _, value: seen.append(value))
    return seen


@case()
def group_result_that_does_not_propagate() -> Any:
    result = group(add.s(1, 1), fail.s("inside")).delay()
    values = result.get(timeout=60, propagate=False)
    return [repr(value) for value in values]


@case()
def result_as_a_tuple() -> Any:
    result = chain(add.s(1, 1), mul.s(2)).delay()
    return got(result_from_tuple(result.as_tuple(), app=app))


@case()
def result_forgotten() -> Any:
    result = add.delay(1, 1)
    got(result)
    result.forget()
    return app.AsyncResult(result.id).state


@case()
def task_that_waits_for_another() -> Any:
    return got(tasks.asks.delay(4))


@case()
def task_that_may_not_wait_for_another() -> Any:
    raised = got(tasks.asks_and_is_refused.delay())
    return [raised["raises"][0], raised["raises"][1][:40]]


@case()
def eager_call() -> Any:
    result = add.apply((1, 2))
    return [result.get(), result.state, ended(add.delay(1, 1))]


@case()
def eager_failure() -> Any:
    result = fail.apply(("eager",))
    return [result.state, repr(result.result)]


@case()
def task_called_as_a_function() -> Any:
    return [add(1, 2), got(add.delay(add(1, 1), 1))]


@case()
def many_results_at_once() -> Any:
    results = [add.delay(number, number) for number in range(60)]
    return [got(result) for result in results]


@case()
def counted_runs() -> Any:
    key = new_key()
    results = [tasks.count.delay(key) for _ in range(20)]
    return sorted(got(result) for result in results)


@case(setups=("late",))
def tasks_end_together() -> Any:
    results = [add.delay(number, 1) for number in range(10)]
    waited(lambda: all(result.ready() for result in results), what="all results")
    return all_ended(results)
