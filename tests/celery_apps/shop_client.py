"""Uses the shop as its programs do, with Celery, and prints what came of it as JSON."""

import json
from typing import Any

from tests.celery_apps.shop.celery import app

WAIT_S = 60.0


def outcomes() -> dict[str, Any]:
    app.loader.import_default_modules()
    from tests.celery_apps.shop import mail, orders, reports, stock

    try:
        orders.reserve.delay(1, fails=True).get(timeout=WAIT_S)
        raised = ""
    except orders.OutOfStock as error:
        raised = repr(error)
    chord = orders.invoice.delay([1, 2, 3]).get(timeout=WAIT_S)
    broken = reports.crash.delay()
    return {
        "replaced by a chain": orders.checkout.delay(7).get(timeout=WAIT_S),
        "pydantic": orders.validate.delay({"number": 3, "total": 2.5}).get(timeout=WAIT_S),
        "retried": orders.capture_payment.delay(9).get(timeout=WAIT_S),
        "with priority": orders.rush.delay(4).get(timeout=WAIT_S),
        "by a topic": mail.send.delay("bob").get(timeout=WAIT_S),
        "under a name": stock.count.delay("a", "b").get(timeout=WAIT_S),
        "raised": raised,
        "chord": app.AsyncResult(chord).get(timeout=WAIT_S),
        "failed": type(app.AsyncResult(broken.id).get(timeout=WAIT_S, propagate=False)).__name__,
    }


def answers() -> dict[str, Any]:
    inspect = app.control.inspect(timeout=10.0, limit=1)

    def first(replies: Any) -> Any:
        return next(iter(replies.values())) if isinstance(replies, dict) else replies

    def tell(name: str, **arguments: Any) -> Any:
        (reply,) = app.control.broadcast(name, arguments=arguments, reply=True, timeout=10.0, limit=1)
        return first(reply)

    return {
        "limits": first(inspect._request("limits")),
        "by its alias": first(inspect._request("shop_limits")),
        "consumer_queues": first(inspect._request("consumer_queues")),
        "set_discount": tell("set_discount", percent=25),
        "afterwards": first(inspect._request("limits")),
        "conf": first(inspect.conf()),
        "report": first(inspect.report()),
    }


if __name__ == "__main__":
    print(json.dumps({"outcomes": outcomes(), "answers": answers()}, default=str))
