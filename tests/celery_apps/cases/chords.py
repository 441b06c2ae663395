"""Chords, alone and inside one another."""

import json
from typing import Any

from celery import chain, chord, group

from tests.celery_apps.asking import (
    all_ended,
    case,
    ended,
    everywhere,
    got,
    journal,
    new_key,
    passed,
    sorted_journal,
    stays_pending,
)
from tests.celery_apps.project.canvas_tasks import (
    adds_group_to_chord,
    adds_to_chord,
    errback,
    old_errback,
    replaced,
    replaced_by_add_in_chord,
    replaced_by_chord,
    replaced_by_group,
    retries_in_a_chain,
    starts_chord,
)
from tests.celery_apps.project.tasks import (
    add,
    echo,
    fail,
    fail_with,
    ids_of,
    ignored,
    mul,
    one,
    total,
    write,
    write_given,
)


@everywhere(quick=True)
def chord_of_three() -> Any:
    return got(chord([add.s(1, 1), add.s(2, 2), add.s(3, 3)], total.s()).delay())


@case()
def chord_called_with_its_body() -> Any:
    return got(chord([add.s(1, 1), add.s(2, 2)])(total.s()))


@case()
def chord_by_pipe() -> Any:
    return got((group(add.s(1, 1), add.s(2, 2)) | total.s()).delay())


@case()
def chord_of_one() -> Any:
    return got(chord([add.s(1, 1)], total.s()).delay())


@case()
def chord_with_an_empty_header() -> Any:
    return got(chord([], echo.s()).delay())


@case(quick=True)
def chord_of_many() -> Any:
    return got(chord([add.s(number, 1) for number in range(40)], total.s()).delay())


@case()
def chord_keeps_the_order() -> Any:
    return got(chord([echo.s(number) for number in range(12)], echo.s()).delay())


@case()
def chord_with_immutable_body() -> Any:
    return got(chord([add.s(1, 1), add.s(2, 2)], echo.si("done")).delay())


@everywhere(quick=True)
def chord_with_a_failing_part() -> Any:
    result = chord([add.s(1, 1), fail.s("part")], total.s()).delay()
    return [ended(result), all_ended(result.parent.results)]


@case()
def chord_with_two_failing_parts() -> Any:
    result = chord([fail.s("part"), fail.s("part"), add.s(1, 1)], total.s()).delay()
    return ended(result)[0]


@case()
def chord_whose_body_fails() -> Any:
    result = chord([add.s(1, 1), add.s(2, 2)], fail_with.s("body")).delay()
    return ended(result)


@case()
def chord_in_a_chain() -> Any:
    return got(chain(add.s(1, 1), chord([add.s(1), add.s(2)], total.s()), mul.s(2)).delay())


@case()
def chord_body_is_a_chain() -> Any:
    return got(chord([add.s(1, 1), add.s(2, 2)], chain(total.s(), mul.s(10), add.s(1))).delay())


@case()
def chord_body_is_a_group() -> Any:
    return got(chord([add.s(1, 1), add.s(2, 2)], group(total.s(), echo.s())).delay())


@case()
def chord_body_is_a_chord() -> Any:
    return got(chord([add.s(1, 1), add.s(2, 2)], chord([total.s(), total.s()], echo.s())).delay())


@case(quick=True)
def chord_header_holds_chains() -> Any:
    return got(chord([chain(add.s(1, 1), mul.s(2)), chain(add.s(2, 2), mul.s(3))], total.s()).delay())


@case(quick=True)
def chord_header_ends_in_a_group() -> Any:
    return got(chord([chain(echo.si(42), group(echo.s(), echo.s())), echo.si(1)], echo.s()).delay())


@case()
def chord_header_holds_a_group() -> Any:
    return got(chord([group(add.s(1, 1), add.s(2, 2)), add.s(3, 3)], echo.s()).delay())


@case(quick=True)
def chord_header_holds_a_chord() -> Any:
    return got(chord([chord([add.s(1, 1), add.s(2, 2)], total.s()), add.s(3, 3)], total.s()).delay())


@case()
def chord_header_holds_a_chain_with_a_chord() -> Any:
    inner = chain(add.s(1, 1), chord([add.s(1), add.s(2)], total.s()), mul.s(2))
    return got(chord([inner, add.s(3, 3)], total.s()).delay())


@case()
def chord_three_deep() -> Any:
    inner = chord([add.s(1, 1), add.s(2, 2)], total.s())
    middle = chord([inner, add.s(3, 3)], total.s())
    return got(chord([middle, add.s(4, 4)], total.s()).delay())


@case()
def failing_chord_in_a_chord() -> Any:
    """Celery tells the inner body alone: the outer one waits for ever."""
    inner = chord([add.s(1, 1), fail.s("deep")], total.s())
    result = chord([inner, add.s(3, 3)], total.s()).delay()
    return [all_ended(result.parent.results), stays_pending(result)]


@case()
def failing_chain_in_a_header() -> Any:
    return ended(chord([chain(add.s(1, 1), fail_with.s("step"), add.s(1)), add.s(3, 3)], total.s()).delay())


@case()
def group_of_chords() -> Any:
    made = [chord([add.s(number, 1), add.s(number, 2)], total.s()) for number in range(3)]
    return got(group(made).delay())


@case()
def chain_of_chords() -> Any:
    first = chord([add.s(1, 1), add.s(2, 2)], total.s())
    second = chord([add.s(1), add.s(2)], total.s())
    return got(chain(first, second, mul.s(2)).delay())


@case()
def groups_in_a_chain() -> Any:
    made = chain(
        group(add.s(1, 1), add.s(2, 2)), group(total.s(), total.s()), group(total.s(), total.s()), echo.s()
    )
    return got(made.delay())


@case()
def chord_with_arguments_for_the_header() -> Any:
    return got(chord([add.s(1), add.s(2)], total.s()).delay(10))


@case()
def chord_with_options_for_the_body() -> Any:
    made = chord([ids_of.s(), ids_of.s()], echo.s().set(queue="urgent", priority=3))
    parts = got(made.delay())
    return [[part["index"] for part in parts], len({part["group"] for part in parts})]


@case()
def chord_with_a_link_on_its_body() -> Any:
    key = new_key()
    made = chord([add.s(1, 1), add.s(2, 2)], total.s())
    made.link(write_given.s(key))
    return [got(made.delay()), journal(key, 1)]


@case()
def chord_part_ignores_its_result() -> Any:
    key = new_key()
    return got(chord([ignored.si(key), one.s()], echo.s()).apply_async())


@case()
def chord_sent_by_a_task() -> Any:
    key = new_key()
    return [got(starts_chord.delay([1, 2, 3], key)), journal(key, 1)]


@case()
def chord_part_retries() -> Any:
    return got(chord([retries_in_a_chain.s(1, new_key()), add.s(1, 1)], total.s()).delay())


@case()
def chord_part_is_replaced() -> Any:
    return got(chord([replaced.s(1), add.s(1, 1)], total.s()).delay())


@case()
def chord_part_is_replaced_by_a_chain() -> Any:
    return got(chord([replaced_by_add_in_chord.s(1), add.s(1, 1)], total.s()).delay())


@case()
def chord_part_is_replaced_by_a_group() -> Any:
    return got(chord([replaced_by_group.s(1), add.s(1, 1)], echo.s()).delay())


@case()
def chord_part_is_replaced_by_a_chord() -> Any:
    return got(chord([replaced_by_chord.s(1), add.s(1, 1)], total.s()).delay())


@case(quick=True)
def task_added_to_its_chord() -> Any:
    return sorted(got(chord([adds_to_chord.s(1), add.s(1, 1)], echo.s()).delay()))


@case()
def tasks_added_to_their_chord() -> Any:
    return sorted(got(chord([adds_group_to_chord.s(1), adds_to_chord.s(2)], echo.s()).delay()))


@case()
def added_to_no_chord() -> Any:
    return ended(adds_to_chord.delay(1))


@case()
def chord_body_is_replaced() -> Any:
    return got(chord([add.s(1, 1), add.s(2, 2)], chain(total.s(), replaced.s())).delay())


@case(quick=True)
def old_errback_of_a_chord() -> Any:
    key = new_key()
    body = total.s().on_error(old_errback.s(key))
    result = chord([add.s(1, 1), fail.s("part")], body).delay()
    return [ended(result), journal(key, 1)]


@case(quick=True)
def errback_of_a_chord() -> Any:
    key = new_key()
    body = total.s().on_error(errback.s(key=key))
    result = chord([add.s(1, 1), fail.s("part")], body).delay()
    return [ended(result), journal(key, 1)]


@case(quick=True)
def tasks_of_a_chords_body_fail_with_its_header() -> Any:
    """They are revoked, too, and yet have failed for whoever looks."""
    made = [chord([add.s(1, 1), fail.s("part")], group(total.s(), echo.s())) for _ in range(5)]
    results = [chords.delay() for chords in made]
    return [sorted(map(json.dumps, all_ended(result.results))) for result in results]


@case()
def link_error_on_a_chord() -> Any:
    key = new_key()
    made = chord([add.s(1, 1), fail.s("part")], total.s())
    made.link_error(errback.s(key=key))
    return [ended(made.delay()), sorted_journal(key, 1)]


@case(setups=("main", "late"))
def link_error_on_a_chord_reaches_the_header() -> Any:
    key = new_key()
    made = chord([add.s(1, 1), fail.s("part")], total.s())
    made.link_error(old_errback.s(key))
    result = made.delay()
    state = ended(result)
    passed()
    return [state, sorted_journal(key, 1)]


@case()
def errback_of_a_body_that_is_a_chain() -> Any:
    key = new_key()
    body = chain(total.s(), mul.s(2)).on_error(errback.s(key=key))
    result = chord([add.s(1, 1), fail.s("part")], body).delay()
    return [ended(result), sorted_journal(key, 1)]


@case()
def errback_of_a_body_that_fails() -> Any:
    key = new_key()
    body = fail_with.s("body").on_error(errback.s(key=key))
    result = chord([add.s(1, 1), add.s(2, 2)], body).delay()
    return [ended(result), journal(key, 1)]


@case()
def chord_then_more_when_it_fails() -> Any:
    made = chain(chord([add.s(1, 1), fail.s("part")], total.s()), add.s(1), write.si(new_key(), "never"))
    result = made.delay()
    return [ended(result.parent.parent), stays_pending(result)]
