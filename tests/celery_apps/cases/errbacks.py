"""Errbacks of both styles, on tasks, chains and groups."""

from typing import Any

from celery import chain, group

from tests.celery_apps.asking import case, ended, everywhere, got, journal, left, new_key, sorted_journal
from tests.celery_apps.project.canvas_tasks import (
    bound_errback,
    errback,
    errback_by_name,
    failing_errback,
    old_errback,
    replaced_by_failure,
    retries_by_itself,
)
from tests.celery_apps.project.celery import app
from tests.celery_apps.project.limited import early, hardly
from tests.celery_apps.project.tasks import (
    add,
    fail,
    fail_odd,
    fail_unpicklable,
    fail_with,
    mul,
    unserializable,
    write,
)


@everywhere(quick=True)
def old_errback_of_a_task() -> Any:
    key = new_key()
    result = fail.apply_async(("old",), link_error=old_errback.s(key))
    return [ended(result), journal(key, 1) == [["old style", result.id]]]


@case(quick=True)
def errback_of_a_task() -> Any:
    key = new_key()
    result = fail.apply_async(("new",), link_error=errback.s(key=key))
    return [ended(result), journal(key, 1)]


@case()
def bound_errback_of_a_task() -> Any:
    key = new_key()
    result = fail.apply_async(("bound",), link_error=bound_errback.s(key=key))
    return [left(result), journal(key, 0)]


@case()
def both_styles_on_a_task() -> Any:
    key = new_key()
    result = fail.apply_async(("both",), link_error=[old_errback.s(key), errback.s(key=key)])
    return [ended(result), sorted_journal(key, 2)]


@case()
def errback_with_keywords() -> Any:
    key = new_key()
    result = fail.apply_async(("named",), link_error=errback_by_name.s().set(kwargs={"key": key}))
    return [ended(result), journal(f"{key}", 0)]


@case()
def errback_that_fails() -> Any:
    key = new_key()
    result = fail.apply_async(("both",), link_error=failing_errback.s(key=key))
    return [left(result), journal(key, 1)]


@case()
def errback_is_a_chain() -> Any:
    key = new_key()
    result = fail.apply_async(("c",), link_error=chain(write.si(key, "one"), write.si(key, "two")))
    return [ended(result), sorted_journal(key, 2)]


@case()
def errback_is_a_group() -> Any:
    key = new_key()
    result = fail.apply_async(("g",), link_error=group(write.si(key, "one"), write.si(key, "two")))
    return [ended(result), sorted_journal(key, 2)]


@case()
def immutable_errback() -> Any:
    key = new_key()
    result = fail.apply_async(("i",), link_error=write.si(key, "immutable"))
    return [ended(result), journal(key, 1)]


@case()
def unknown_errback() -> Any:
    result = fail.apply_async(("u",), link_error=app.signature("no.such.errback"))
    return ended(result)


@case(quick=True)
def errback_of_a_chain() -> Any:
    key = new_key()
    made = chain(add.s(1, 1), fail_with.s("middle"), add.s(1)).on_error(errback.s(key=key))
    return [got(made.delay()), journal(key, 1)]


@case()
def errback_of_a_chain_by_link_error() -> Any:
    key = new_key()
    result = chain(add.s(1, 1), fail_with.s("middle"), add.s(1)).apply_async(link_error=old_errback.s(key))
    return [got(result), journal(key, 1)]


@case()
def errback_of_one_step() -> Any:
    key = new_key()
    result = chain(add.s(1, 1), fail_with.s("middle").on_error(errback.s(key=key)), add.s(1)).delay()
    return [got(result), journal(key, 1)]


@case()
def errback_of_a_later_step_is_not_called() -> Any:
    key = new_key()
    result = chain(fail.si("first"), add.s(1).on_error(errback.s(key=key))).delay()
    return [got(result), journal(key, 0)]


@case(quick=True)
def errback_of_a_group() -> Any:
    key = new_key()
    made = group(add.s(1, 1), fail.s("one"))
    made.link_error(errback.s(key=key))
    result = made.delay()
    return [got(result), sorted_journal(key, 1)]


@case()
def errback_of_a_group_by_option() -> Any:
    key = new_key()
    result = group(add.s(1, 1), fail.s("one")).apply_async(link_error=old_errback.s(key))
    return [got(result), sorted_journal(key, 1)]


@case()
def errback_of_a_group_in_a_chain() -> Any:
    key = new_key()
    made = chain(add.s(1, 1), group(fail_with.s("a"), mul.s(2))).on_error(errback.s(key=key))
    return [got(made.delay()), sorted_journal(key, 1)]


@case()
def errback_after_retries() -> Any:
    key, other = new_key(), new_key()
    result = retries_by_itself.apply_async((key,), link_error=errback.s(key=other))
    return [ended(result), journal(key, 3), journal(other, 1)]


@case()
def errback_after_a_replacement() -> Any:
    key = new_key()
    result = replaced_by_failure.apply_async(("replaced",), link_error=errback.s(key=key))
    return [ended(result), journal(key, 1)]


@case()
def errback_after_a_hard_limit() -> Any:
    key, other = new_key(), new_key()
    result = hardly.apply_async((key,), link_error=errback.s(key=other))
    return [ended(result), journal(other, 1)]


@case()
def old_errback_after_a_hard_limit() -> Any:
    key, other = new_key(), new_key()
    result = hardly.apply_async((key,), link_error=old_errback.s(other))
    return [ended(result), journal(other, 1)]


@case(alone=True)
def errback_after_a_lost_child() -> Any:
    key, other = new_key(), new_key()
    result = early.apply_async((key, "die"), link_error=errback.s(key=other))
    return [ended(result), journal(other, 1)]


@case()
def error_that_cannot_be_made_again() -> Any:
    return ended(fail_odd.delay())


@case()
def error_that_cannot_be_pickled() -> Any:
    return ended(fail_unpicklable.delay())


@case()
def result_that_cannot_be_serialized() -> Any:
    return ended(unserializable.delay())
