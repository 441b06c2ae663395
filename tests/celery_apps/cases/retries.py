"""Retries, by the task's own word and by themselves; tasks that are replaced."""

from typing import Any

from celery import chain, chord, group

from tests.celery_apps.asking import (
    case,
    ended,
    everywhere,
    got,
    is_in_state,
    journal,
    last_of_traceback,
    new_key,
)
from tests.celery_apps.project import canvas_tasks as tasks
from tests.celery_apps.project.tasks import add, annotated, echo, fail_from, mul, total, write_given


@everywhere(quick=True)
def retry_twice() -> Any:
    key = new_key()
    return [got(tasks.retries.delay(key, 2)), journal(key, 3)]


@case(quick=True)
def retry_until_the_error_is_raised() -> Any:
    key = new_key()
    return [ended(tasks.retries_with_error.delay(key)), journal(key, 3)]


@case()
def retry_until_there_are_too_many() -> Any:
    key = new_key()
    return [ended(tasks.retries_for_nothing.delay(key)), journal(key, 2)]


@case()
def too_many_retries_are_caught() -> Any:
    key = new_key()
    return [ended(tasks.catches_the_last.delay(key)), journal(key, 1)]


@case()
def retry_without_end() -> Any:
    return got(tasks.retries_without_end.delay(6))


@case(quick=True)
def retry_with_other_arguments() -> Any:
    return got(tasks.retries_otherwise.delay(1, y=1))


@case()
def retry_in_another_queue() -> Any:
    return got(tasks.retries_elsewhere.delay())


@case()
def retry_without_raising() -> Any:
    key = new_key()
    tasks.retries_without_raising.delay(key)
    return journal(key, 2)


@case()
def retry_with_its_own_maximum() -> Any:
    key = new_key()
    return [ended(tasks.overrides_max.delay(key)), journal(key, 2)]


@case(quick=True)
def autoretry() -> Any:
    key = new_key()
    return [ended(tasks.retries_by_itself.delay(key)), journal(key, 3)]


@case()
def no_autoretry_for_some() -> Any:
    key = new_key()
    return [ended(tasks.does_not_retry.delay(key)), journal(key, 1)]


@case()
def autoretry_backs_off() -> Any:
    key = new_key()
    return [ended(tasks.backs_off.delay(key)), journal(key, 2)]


@case()
def retry_is_seen_as_a_state() -> Any:
    result = tasks.backs_off.delay(new_key())
    return is_in_state(result, "RETRY")


@case()
def retry_in_a_chain() -> Any:
    return got(chain(add.s(1, 1), tasks.retries_in_a_chain.s(new_key()), mul.s(2)).delay())


@case()
def retry_in_a_group() -> Any:
    return got(
        group(tasks.retries_in_a_chain.s(1, new_key()), tasks.retries_in_a_chain.s(2, new_key())).delay()
    )


@case()
def retry_keeps_links() -> Any:
    key = new_key()
    tasks.retries.apply_async((new_key(), 1), link=write_given.s(key))
    return journal(key, 1)


@case()
def retry_keeps_options() -> Any:
    return got(tasks.shows_after_retry.apply_async(time_limit=40, soft_time_limit=30))


@case()
def retry_by_annotation() -> Any:
    return got(annotated.delay())


@case()
def signature_from_a_request() -> Any:
    return got(tasks.signs_retry.delay(7))


@case()
def retry_when_eager() -> Any:
    result = tasks.retries.apply((new_key(), 2))
    return [result.state, result.get()]


@case()
def cause_of_an_error() -> Any:
    result = fail_from.delay()
    return [ended(result), last_of_traceback(result)]


# ---- replacements ----------------------------------------------------------------------------------


@everywhere(quick=True, without="rpc")  # there Celery's client waits in vain
def replaced_by_a_task() -> Any:
    return got(tasks.replaced.delay(1))


@case(quick=True)
def replaced_by_a_chain() -> Any:
    return got(tasks.replaced_by_chain.delay(1))


@case()
def replaced_by_a_group() -> Any:
    return got(tasks.replaced_by_group.delay(1))


@case()
def replaced_by_a_chord() -> Any:
    return got(tasks.replaced_by_chord.delay(1))


@case()
def replaced_by_an_empty_group() -> Any:
    return got(tasks.replaced_by_empty_group.delay())


@case()
def replaced_by_a_failure() -> Any:
    return ended(tasks.replaced_by_failure.delay("after all"))


@case()
def replaced_often() -> Any:
    return got(tasks.replaced_often.delay(4))


@case()
def replaced_in_a_chain() -> Any:
    return got(chain(add.s(1, 1), tasks.replaced.s(), mul.s(2)).delay())


@case()
def replaced_by_a_chain_in_a_chain() -> Any:
    return got(chain(add.s(1, 1), tasks.replaced_by_chain.s(), mul.s(2)).delay())


@case()
def replaced_by_a_group_in_a_chain() -> Any:
    return got(chain(tasks.replaced_by_group.s(1), total.s()).delay())


@case()
def replaced_by_a_chord_in_a_chain() -> Any:
    return got(chain(tasks.replaced_by_chord.s(1), mul.s(2)).delay())


@case()
def replaced_first_in_a_group() -> Any:
    return got(group(tasks.replaced.s(1), tasks.replaced_by_chain.s(2)).delay())


@case()
def replaced_with_a_link() -> Any:
    key = new_key()
    result = tasks.replaced.apply_async((1,), link=write_given.s(key))
    return [got(result), journal(key, 1)]


@case()
def replaced_with_options_of_its_own() -> Any:
    return got(tasks.replaced_with_options.delay(new_key()))


@case()
def replaced_in_a_chord_header_that_is_nested() -> Any:
    return got(chord([chain(tasks.replaced_by_chord.s(1), add.s(1)), add.s(1, 1)], total.s()).delay())


@case()
def signature_as_an_argument() -> Any:
    return got(tasks.runs_given.delay(add.s(5), 3))


@case()
def signature_as_a_result() -> Any:
    value = got(tasks.returns_signature.delay(3))
    return [value["task"], value["args"]] if isinstance(value, dict) and "task" in value else value


@case()
def echo_of_nothing() -> Any:
    return got(echo.delay())
