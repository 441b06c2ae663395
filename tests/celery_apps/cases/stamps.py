"""Stamps, and revokes: by id, by stamp, of waiting and of running tasks."""

from typing import Any

from celery import chain, chord, group, states
from celery.canvas import StampingVisitor

from tests.celery_apps.asking import (
    began,
    case,
    ended,
    everywhere,
    got,
    journal,
    new_key,
    open_gate,
    sorted_journal,
    stays_pending,
)
from tests.celery_apps.project.canvas_tasks import replaced, retries
from tests.celery_apps.project.celery import app
from tests.celery_apps.project.hooked import watched, watched_hold
from tests.celery_apps.project.tasks import (
    add,
    echo,
    hold,
    ignored,
    request_of,
    retries_the_hold,
    stamps_of,
    total,
    write,
    write_given,
)

ASK_S = 20.0


class Numbered(StampingVisitor):
    def __init__(self, value: str) -> None:
        self.value = value

    def on_signature(self, sig: Any, **headers: Any) -> dict[str, Any]:
        return {"monitor": self.value, "stamped_headers": ["monitor"]}


class Everything(StampingVisitor):
    """Stamps each kind with its own name, without saying which headers are stamps."""

    def on_signature(self, sig: Any, **headers: Any) -> dict[str, Any]:
        return {"on_signature": "s"}

    def on_group_start(self, sig: Any, **headers: Any) -> dict[str, Any]:
        return {"on_group": "g"}

    def on_chain_start(self, sig: Any, **headers: Any) -> dict[str, Any]:
        return {"on_chain": "c"}

    def on_chord_header_start(self, sig: Any, **headers: Any) -> dict[str, Any]:
        return {"on_header": "h"}

    def on_chord_body(self, sig: Any, **headers: Any) -> dict[str, Any]:
        return {"on_body": "b"}

    def on_callback(self, sig: Any, **headers: Any) -> dict[str, Any]:
        return {"on_callback": "cb"}


@case(quick=True)
def stamp_by_keyword() -> Any:
    made = stamps_of.s()
    made.stamp(customer="7", tags=["a", "b"])
    return got(made.delay())


@case()
def stamp_by_visitor() -> Any:
    made = stamps_of.s()
    made.stamp(Numbered("m1"))
    return got(made.delay())


@case(quick=True)
def stamp_of_a_chain() -> Any:
    made = chain(stamps_of.si(), stamps_of.si())
    made.stamp(Everything())
    result = made.delay()
    return [got(result.parent), got(result)]


@case()
def stamp_of_a_group() -> Any:
    made = group(stamps_of.si(), stamps_of.si())
    made.stamp(Everything())
    return got(made.delay())


@case()
def stamp_of_a_chord() -> Any:
    made = chord([stamps_of.si(), stamps_of.si()], echo.s())
    made.stamp(Everything())
    return got(made.delay())


@case()
def stamp_of_a_link() -> Any:
    key = new_key()
    made = add.s(1, 1)
    made.link(stamps_of.s() | write_given.s(key))
    made.stamp(Everything())
    return [got(made.delay()), journal(key, 1)]


@case()
def stamp_lives_through_a_replacement() -> Any:
    key = new_key()
    made = chain(replaced.s(1), stamps_of.s(), write_given.s(key))
    made.stamp(customer="7")
    return [got(made.delay()), journal(key, 1)]


@case()
def stamp_lives_through_a_retry() -> Any:
    made = chain(retries.si(new_key(), 1), stamps_of.si())
    made.stamp(customer="7")
    return got(made.delay())


@case()
def stamp_twice() -> Any:
    made = stamps_of.s()
    made.stamp(customer="7")
    made.stamp(customer="8", append_stamps=True)
    return got(made.delay())


@case()
def stamps_in_the_request() -> Any:
    made = request_of.s()
    made.stamp(customer="7")
    seen = got(made.delay())
    return [seen["stamped_headers"], seen["stamps"], seen["headers"]]


# ---- revokes ---------------------------------------------------------------------------------------


@everywhere(quick=True)
def revoked_before_it_is_due() -> Any:
    key = new_key()
    result = write.apply_async((key, "ran"), countdown=2)
    app.control.revoke(result.id, reply=True, timeout=ASK_S, limit=1)
    return [ended(result), journal(key, 0)]


@case(quick=True)
def revoked_by_the_result() -> Any:
    result = add.apply_async((1, 1), countdown=2)
    result.revoke(wait=True, timeout=1.0)
    return got(result)


@case(quick=True, setups=("main", "database", "django"))
def revoked_is_seen_at_once() -> Any:
    result = add.apply_async((1, 1), countdown=10)
    app.control.revoke(result.id, reply=True, timeout=ASK_S, limit=1)
    return app.AsyncResult(result.id).state


@case(quick=True)
def a_revoke_leaves_what_has_begun_or_ended() -> Any:
    """Also where nobody here has ever seen the task."""
    kept = {new_key(): state for state in (states.STARTED, "PROGRESS", states.SUCCESS)}
    unseen = new_key()
    for task_id, state in kept.items():
        app.backend.store_result(task_id, {"done": 1}, state)
    app.control.revoke([*kept, unseen], reply=True, timeout=ASK_S, limit=1)
    return [[app.AsyncResult(task_id).state for task_id in kept], ended(app.AsyncResult(unseen))]


@case()
def revoked_several() -> Any:
    results = [add.apply_async((number, 1), countdown=2) for number in range(3)]
    app.control.revoke([result.id for result in results], reply=True, timeout=ASK_S, limit=1)
    return [ended(result) for result in results]


@case()
def revoked_and_ignored() -> Any:
    key = new_key()
    result = ignored.apply_async((key,), countdown=2)
    app.control.revoke(result.id, reply=True, timeout=ASK_S, limit=1)
    later = add.apply_async((1, 1), countdown=3)
    return [got(later), stays_pending(result), journal(key, 0)]


@case(alone=True)
def terminated_while_it_runs() -> Any:
    gate = new_key()
    result = hold.delay(gate)
    began(gate)
    app.control.revoke(result.id, terminate=True, signal="SIGKILL", reply=True, timeout=ASK_S, limit=1)
    return [ended(result), journal(gate, 1)]


@case(alone=True)
def terminated_gently() -> Any:
    gate = new_key()
    result = hold.delay(gate)
    began(gate)
    app.control.terminate(result.id, signal="SIGTERM", reply=True, timeout=ASK_S, limit=1)
    return [ended(result), journal(gate, 1)]


@case(alone=True)
def terminated_though_it_retries_by_itself() -> Any:
    gate = new_key()
    result = retries_the_hold.delay(gate)
    began(gate)
    app.control.revoke(result.id, terminate=True, reply=True, timeout=ASK_S, limit=1)
    return [ended(result), journal(gate, 1)]


@case(alone=True)
def terminated_signals() -> Any:
    gate = new_key()
    result = watched_hold.delay(gate)
    began(gate)
    app.control.revoke(result.id, terminate=True, signal="SIGKILL", reply=True, timeout=ASK_S, limit=1)
    return [ended(result), sorted_journal(f"signals-{result.id}", 2)]


@case()
def running_task_that_is_revoked_goes_on() -> Any:
    gate = new_key()
    result = hold.delay(gate)
    began(gate)
    app.control.revoke(result.id, reply=True, timeout=ASK_S, limit=1)
    open_gate(gate)
    return [ended(result), journal(gate, 2)]


@case()
def revoked_signals() -> Any:
    result = watched.apply_async((1, 1), countdown=2)
    app.control.revoke(result.id, reply=True, timeout=ASK_S, limit=1)
    return [ended(result), journal(f"signals-{result.id}", 1)]


@case()
def revoked_step_of_a_chain() -> Any:
    key = new_key()
    result = chain(add.s(1, 1).set(countdown=2), write_given.s(key)).delay()
    app.control.revoke(result.parent.id, reply=True, timeout=ASK_S, limit=1)
    return [ended(result.parent), stays_pending(result), journal(key, 0)]


@case()
def revoked_part_of_a_chord() -> Any:
    header = [add.s(1, 1).set(countdown=2), add.s(2, 2)]
    result = chord(header, total.s()).delay()
    app.control.revoke(result.parent.results[0].id, reply=True, timeout=ASK_S, limit=1)
    return ended(result)


@case(quick=True)
def revoked_by_stamp() -> Any:
    key, stamp = new_key(), new_key()
    made = write.s(key, "ran").set(countdown=2)
    made.stamp(customer=stamp)
    result = made.delay()
    app.control.revoke_by_stamped_headers({"customer": [stamp]}, reply=True, timeout=ASK_S, limit=1)
    return [ended(result), journal(key, 0)]


@case(alone=True)
def terminated_by_stamp() -> Any:
    gate, stamp = new_key(), new_key()
    made = hold.s(gate)
    made.stamp(customer=stamp)
    result = made.delay()
    began(gate)
    app.control.revoke_by_stamped_headers(
        {"customer": [stamp]}, terminate=True, signal="SIGKILL", reply=True, timeout=ASK_S, limit=1
    )
    return [ended(result), journal(gate, 1)]


@case()
def revoked_before_it_was_sent() -> Any:
    key, task_id = new_key(), new_key()
    app.control.revoke(task_id, reply=True, timeout=ASK_S, limit=1)
    result = write.apply_async((key, "ran"), task_id=task_id)
    return [ended(result), journal(key, 0)]
