"""Chains, groups, maps and chunks."""

from typing import Any

from celery import chain, chunks, group, signature

from tests.celery_apps.asking import (
    all_ended,
    case,
    ended,
    everywhere,
    got,
    journal,
    new_key,
    sorted_journal,
)
from tests.celery_apps.project.celery import app
from tests.celery_apps.project.tasks import add, echo, fail, fail_with, ids_of, mul, total, write, write_given


@everywhere(quick=True)
def chain_of_three() -> Any:
    return got(chain(add.s(1, 2), mul.s(10), add.s(5)).delay())


@case()
def chain_by_pipes() -> Any:
    return got((add.s(1, 2) | mul.s(10) | add.s(5)).delay())


@case()
def chain_called() -> Any:
    return got(chain(add.s(1, 2), mul.s(10))())


@case()
def chain_from_a_list() -> Any:
    return got(chain([add.s(1, 2), mul.s(10)]).delay())


@case()
def chain_of_one() -> Any:
    return got(chain(add.s(1, 2)).delay())


@case()
def empty_chain() -> Any:
    return repr(chain().apply_async())


@case()
def empty_chain_first() -> Any:
    return got(chain(chain(), add.s(1, 1)).delay())


@case(quick=True)
def chain_with_immutable_steps() -> Any:
    return got(chain(add.s(1, 2), add.si(5, 5), echo.s()).delay())


@case()
def chain_in_a_chain() -> Any:
    return got(chain(add.s(1, 1), chain(mul.s(3), chain(add.s(1), mul.s(2)))).delay())


@everywhere(quick=True)
def chain_that_fails_in_the_middle() -> Any:
    result = chain(add.s(1, 1), fail_with.s("here"), add.s(1)).delay()
    return [ended(result.parent), ended(result.parent.parent), got(result)]


@case()
def chain_that_fails_first() -> Any:
    result = chain(fail.si("first"), add.s(1), add.s(2)).delay()
    return [
        got(result),
        ended(result.parent.parent),
        result.parent.parent.id == result.root_id if hasattr(result, "root_id") else None,
    ]


@case()
def chain_with_partial_arguments() -> Any:
    return got(chain(add.s(4), mul.s(2)).delay(3))


@case()
def chain_with_keyword_arguments() -> Any:
    return got(chain(add.s(x=4, y=1), add.s(y=3)).delay())


@case()
def chain_with_a_countdown() -> Any:
    return got(chain(add.s(1, 1).set(countdown=1), mul.s(3).set(countdown=1)).delay())


@case(quick=True)
def chain_ids() -> Any:
    result = chain(ids_of.si(), ids_of.si(), ids_of.si()).delay()
    last, middle, first = got(result), got(result.parent), got(result.parent.parent)
    return [
        first["root"] == first["own"],
        first["parent"],
        middle["root"] == first["own"],
        middle["parent"] == first["own"],
        last["parent"] == middle["own"],
        last["root"] == first["own"],
    ]


@everywhere(quick=True)
def group_of_three() -> Any:
    return got(group(add.s(1, 1), add.s(2, 2), add.s(3, 3)).delay())


@case()
def group_called() -> Any:
    return got(group(add.s(number, 1) for number in range(5))())


@case()
def group_with_arguments() -> Any:
    return got(group(add.s(1), mul.s(3)).delay(10))


@case()
def empty_group() -> Any:
    result = group([]).delay()
    return [got(result), result.ready(), result.successful()]


@case()
def group_with_a_failure() -> Any:
    result = group(add.s(1, 1), fail.s("in a group"), add.s(2, 2)).delay()
    return [got(result), all_ended(result.results), result.failed(), result.completed_count()]


@case()
def group_ids() -> Any:
    result = group(ids_of.s(), ids_of.s()).delay()
    seen = got(result)
    return [
        [part["group"] == result.id for part in seen],
        [part["index"] for part in seen],
        [part["root"] == part["own"] for part in seen],
    ]


@case()
def group_in_a_group() -> Any:
    return got(group(add.s(1, 1), group(add.s(2, 2), add.s(3, 3))).delay())


@case()
def chains_in_a_group() -> Any:
    return got(group(chain(add.s(1, 1), mul.s(2)), chain(add.s(2, 2), mul.s(3))).delay())


@case(quick=True)
def chain_into_a_group() -> Any:
    return got(chain(add.s(1, 1), group(mul.s(2), mul.s(3))).delay())


@case()
def group_piped_into_a_group() -> Any:
    return got((group(add.s(1, 1), add.s(2, 2)) | group(total.s(), echo.s())).delay())


@case()
def group_then_group_then_task() -> Any:
    return got((group(add.s(1, 1), add.s(2, 2)) | group(total.s(), total.s()) | total.s()).delay())


@case()
def failing_group_piped_into_a_group() -> Any:
    return got((group(add.s(1, 1), fail.s("early")) | group(total.s(), echo.s())).delay())


@case(quick=True)
def failure_before_a_group_and_a_body() -> Any:
    return got((fail.si("first") | group(add.s(1), add.s(2)) | total.s()).delay())


@case()
def group_of_generators() -> Any:
    return got(group((add.s(number, number) for number in range(3)), app=app).apply_async())


@case()
def map_of_a_task() -> Any:
    return got(total.map([[1, 2], [3, 4]]).delay())


@case(quick=True)
def starmap_of_a_task() -> Any:
    return got(add.starmap([(1, 2), (3, 4)]).delay())


@case()
def chunks_of_a_task() -> Any:
    return got(add.chunks([(number, number) for number in range(7)], 3)())


@case()
def chunks_as_a_group() -> Any:
    made = chunks(add.s(), zip(range(4), range(4), strict=True), 2)
    return got(made.group().skew(start=0, stop=0.1, step=0.1).delay())


@case()
def starmap_in_a_chain() -> Any:
    return got(chain(add.starmap([(1, 2), (3, 4)]), total.s()).delay())


@case()
def map_that_fails() -> Any:
    return got(total.map([[1], ["x"]]).delay())


@case()
def signature_from_a_dict() -> Any:
    made = signature(dict(add.s(2, 3)), app=app)
    return got(made.delay())


@case()
def signature_by_name() -> Any:
    return got(app.signature("tests.celery_apps.project.tasks.add", args=(3, 4)).delay())


@case(quick=True)
def link_on_a_task() -> Any:
    key = new_key()
    add.apply_async((2, 2), link=write_given.s(key))
    return journal(key, 1)


@case()
def several_links_on_a_task() -> Any:
    key = new_key()
    add.apply_async((2, 2), link=[write_given.s(key), write.si(key, "second"), add.s(3) | write_given.s(key)])
    return sorted_journal(key, 3)


@case()
def link_of_a_group() -> Any:
    key = new_key()
    add.apply_async((2, 2), link=[group(write_given.s(key), write_given.s(key)), write.si(key, "alone")])
    return sorted_journal(key, 3)


@case()
def link_on_a_chain() -> Any:
    key = new_key()
    made = chain(add.s(1, 1), mul.s(5))
    made.link(write_given.s(key))
    return [got(made.delay()), journal(key, 1)]


@case()
def link_on_a_group() -> Any:
    key = new_key()
    made = group(add.s(1, 1), add.s(2, 2))
    made.link(write_given.s(key))
    return [got(made.delay()), sorted_journal(key, 1)]


@case()
def link_is_not_called_after_a_failure() -> Any:
    key = new_key()
    result = fail.apply_async(("no link",), link=write.si(key, "called"))
    return [ended(result), journal(key, 0)]


@case()
def children_of_links() -> Any:
    result = add.apply_async((1, 1), link=add.s(10))
    return [got(result), [got(child) for child in result.children]]


@case()
def cloned_and_replaced_options() -> Any:
    made = add.s(1).set(queue="urgent").clone(args=(5,), priority=3)
    return [got(made.delay()), made.options["queue"], made.options["priority"]]


@case()
def chain_sent_to_another_queue() -> Any:
    result = chain(ids_of.si(), echo.si("urgent").set(queue="urgent"), echo.s()).apply_async(queue="urgent")
    return got(result)


@case()
def long_chain() -> Any:
    return got(chain(add.s(0, 1), *[add.s(1) for _ in range(30)]).delay())


@case()
def complex_signature_repr_survives() -> Any:
    made = chain(add.s(1, 1), group(mul.s(2), chain(mul.s(3), add.s(1))), total.s())
    return [got(made.delay()), got(signature(dict(made), app=app).delay())]
