"""What a task sees of its message; serializers, compression, headers, routes, times and priorities."""

from datetime import UTC, datetime, timedelta
from decimal import Decimal
from time import time
from typing import Any
from uuid import UUID

from celery import chain, group

from tests.celery_apps.asking import case, ended, everywhere, got, journal, new_key, sorted_journal
from tests.celery_apps.project import tasks
from tests.celery_apps.project.celery import app
from tests.celery_apps.project.tasks import add, echo, request_of


def _seen(**options: Any) -> Any:
    """Without what says which process or moment it was."""
    seen = got(request_of.apply_async((1,), {"b": 2}, **options))
    for name in ("origin", "reply_to", "eta", "expires"):
        if isinstance(seen, dict) and seen[name]:
            seen[name] = type(seen[name]).__name__
    return seen


@case(quick=True, setups=("main", "late"))
def request() -> Any:
    return _seen()


@case(quick=True)
def request_with_options() -> Any:
    return _seen(
        shadow="other",
        headers={"mine": 1},
        priority=3,
        time_limit=20,
        soft_time_limit=10,
        countdown=0.1,
        expires=60,
    )


@case()
def request_in_another_queue() -> Any:
    return _seen(queue="urgent")


@case(setups=("main", "late"))
def request_in_a_group() -> Any:
    seen = got(group(request_of.s(1), request_of.s(2)).delay())
    return [[part[name] for name in ("group_index", "args", "chord", "delivery_info")] for part in seen]


@case()
def request_in_a_chain() -> Any:
    result = chain(request_of.si(1), echo.si(2)).delay()
    seen = got(result.parent)
    return [[step["task"] for step in seen["chain"]], seen["callbacks"], seen["errbacks"]]


@case()
def request_with_links() -> Any:
    seen = got(request_of.apply_async(link=echo.s(), link_error=tasks.write.si("k", "l")))
    return [[step["task"] for step in seen["callbacks"]], [step["task"] for step in seen["errbacks"]]]


@case()
def properties() -> Any:
    seen = got(tasks.properties_of.apply_async(priority=2))
    return {
        "priority": seen["priority"],
        "delivery_mode": seen["delivery_mode"],
        "ids": sorted(name for name in ("correlation_id", "reply_to") if seen[name]),
    }


@case()
def names_of_properties() -> Any:
    return sorted(got(tasks.properties_of.delay()))


@case()
def properties_of_the_users_own() -> Any:
    seen = got(tasks.properties_of.apply_async(app_id="my app", user_id="guest", type="mine"))
    return {name: seen.get(name) for name in ("app_id", "type")}


@case(quick=True)
def headers_of_the_users_own() -> Any:
    return got(tasks.headers_of.apply_async(headers={"mine": "yes", "my_id": 7}))


@everywhere(quick=True)
def pickled_arguments() -> Any:
    value = {"when": datetime(2024, 1, 2, tzinfo=UTC), "amount": Decimal("1.50"), "pair": (1, 2)}
    return got(echo.apply_async((value,), serializer="pickle"))


@case()
def values_that_json_says_in_its_own_way() -> Any:
    value = {
        "when": datetime(2024, 1, 2, 3, 4, 5, tzinfo=UTC),
        "amount": Decimal("1.50"),
        "id": UUID(int=7),
        "bytes": b"\x00\xff",
        "span": (1, 2),
    }
    seen = got(echo.delay(value))
    return {name: repr(part) for name, part in seen.items()}


@case()
def kinds_of_arguments_that_arrive() -> Any:
    return got(echo.delay(1, 2.5, None, True, "ü", [1, [2]], {"a": {"b": 1}}, key="value"))


@case(quick=True)
def compressed_by_gzip() -> Any:
    return len(got(echo.apply_async(("x" * 5000,), compression="gzip")))


@case()
def compressed_by_bzip2() -> Any:
    return len(got(echo.apply_async(("x" * 5000,), compression="bzip2")))


@case()
def compressed_in_a_chain() -> Any:
    return got(chain(echo.s("x" * 100).set(compression="zlib"), add.s("y").set(compression="gzip")).delay())


@case()
def large_argument() -> Any:
    return len(got(echo.delay("x" * 1_000_000)))


@case()
def shadow_name() -> Any:
    result = request_of.apply_async(shadow="shown.otherwise")
    return [got(result)["shadow"], result.id != ""]


@case(quick=True)
def routed_by_setting() -> Any:
    return got(tasks.routed.delay())


@case(quick=True)
def routed_by_pattern_to_a_topic() -> Any:
    return got(tasks.letter.delay())


@case()
def sent_to_an_exchange_by_hand() -> Any:
    return got(
        tasks.letter.apply_async(exchange="post", exchange_type="topic", routing_key="letters.home.near")
    )


@case()
def step_goes_to_a_topic() -> Any:
    return got(chain(add.s(1, 1), tasks.letter.si()).delay())


@case()
def named_by_hand() -> Any:
    return got(tasks.named.delay())


@case()
def sent_by_name() -> Any:
    return got(app.send_task("named.by.hand"))


@case(quick=True)
def id_given_by_the_client() -> Any:
    given = new_key()
    result = tasks.ids_of.apply_async(task_id=given)
    return [got(result)["own"] == given, result.id == given]


@case()
def ids_given_by_the_client() -> Any:
    given = new_key()
    seen = got(tasks.ids_of.apply_async(root_id=given, parent_id=given))
    return [seen["root"] == given, seen["parent"] == given]


@everywhere(quick=True)
def countdown() -> Any:
    return got(add.apply_async((1, 1), countdown=1))


@case(setups=("main", "late"))
def countdown_is_waited_for() -> Any:
    before = time()
    return got(tasks.clock.apply_async(countdown=2)) - before >= 2


@case(setups=("main", "late"))
def eta_is_waited_for() -> Any:
    before = time()
    return got(tasks.clock.apply_async(eta=datetime.now(UTC) + timedelta(seconds=2))) - before >= 2


@case(setups=("main", "late"))
def eta() -> Any:
    return got(add.apply_async((1, 1), eta=datetime.now(UTC) + timedelta(seconds=1)))


@case()
def eta_without_a_zone() -> Any:
    return got(add.apply_async((1, 1), eta=datetime.now(UTC).replace(tzinfo=None)))


@case()
def eta_that_has_passed() -> Any:
    return got(add.apply_async((1, 1), eta=datetime(2020, 1, 1, tzinfo=UTC)))


@case(quick=True)
def expired_before_it_is_due() -> Any:
    key = new_key()
    result = tasks.write.apply_async((key, "ran"), countdown=1.5, expires=0.8)
    return [ended(result), journal(key, 0)]


@case()
def expires_later() -> Any:
    return got(add.apply_async((1, 1), expires=60))


@case()
def expires_at_a_moment() -> Any:
    return got(add.apply_async((1, 1), expires=datetime.now(UTC) + timedelta(minutes=5)))


@case()
def priorities_all_run() -> Any:
    key = new_key()
    results = [tasks.write.apply_async((key, number), priority=number) for number in (0, 3, 6, 9)]
    return [[got(result) for result in results], sorted_journal(key, 4)]


@case()
def priority_is_seen() -> Any:
    return got(request_of.apply_async(priority=6))["delivery_info"]


@case()
def priority_goes_to_the_next_step() -> Any:
    result = chain(request_of.si().set(priority=6), request_of.si()).delay()
    return [got(result.parent)["delivery_info"]["priority"], got(result)["delivery_info"]["priority"]]


@case(setups=("late",))
def priority_is_inherited() -> Any:
    result = chain(request_of.si().set(priority=6), request_of.si()).delay()
    return [got(result.parent)["delivery_info"]["priority"], got(result)["delivery_info"]["priority"]]


@case(quick=True)
def pydantic_model() -> Any:
    return got(tasks.ship.delay({"number": 2, "names": ["a"]}, times=3))


@case()
def pydantic_model_that_is_wrong() -> Any:
    raised = got(tasks.ship.delay({"number": "many"}))
    return [raised["raises"][0], raised["raises"][1][:60]]


@case()
def pydantic_model_that_is_strict() -> Any:
    return [
        got(tasks.ship_strictly.delay({"number": 2})),
        "raises" in str(got(tasks.ship_strictly.delay({"number": "2"}))),
    ]


@case()
def wrong_number_of_arguments() -> Any:
    result = app.send_task("tests.celery_apps.project.tasks.add", (1, 2, 3, 4))
    return ended(result)


@case()
def no_check_of_arguments() -> Any:
    return ended(tasks.loose.delay(1, 2, 3))


@case()
def argsrepr_of_the_client() -> Any:
    return got(request_of.apply_async((1,), argsrepr="(secret)", kwargsrepr="{hidden}"))["argsrepr"]


@case()
def protocol_one() -> Any:
    """A message as old clients send it: everything is in the body."""
    options = ("eta", "expires", "callbacks", "errbacks", "taskset", "chord")
    body: dict[str, Any] = dict.fromkeys(options)
    body |= {"task": "tests.celery_apps.project.tasks.add", "id": new_key(), "args": [2, 3], "kwargs": {}}
    body |= {"retries": 0, "utc": True, "timelimit": [None, None]}
    with app.producer_or_acquire() as producer:
        queue = app.amqp.queues["main"]
        producer.publish(
            body, exchange=queue.exchange, routing_key="main", declare=[queue], serializer="json"
        )
    return ended(app.AsyncResult(body["id"]))
