"""Orders: what must not be lost."""

# mypy: disable-error-code="untyped-decorator, misc"

from typing import Any

from celery import chain, chord, shared_task
from celery.utils.log import get_task_logger
from pydantic import BaseModel

from tests.celery_apps.shop.bases import Audited, WithCart

log = get_task_logger(__name__)


class OutOfStock(Exception):
    """Expected: it is no bug when it happens."""


class Order(BaseModel):
    number: int
    total: float = 0.0


@shared_task(base=WithCart, bind=True, acks_late=True, reject_on_worker_lost=True)
def place(self: Any, number: int) -> dict[str, Any]:
    self.cart.append(str(number))
    log.info("order %s placed", number)
    return {"number": number, "items": len(self.cart), "queue": self.request.delivery_info["routing_key"]}


@shared_task(base=Audited, acks_late=True, reject_on_worker_lost=True)
def pay(order: dict[str, Any], amount: float = 10.0) -> dict[str, Any]:
    return order | {"paid": amount}


@shared_task(base=Audited, acks_late=True, acks_on_failure_or_timeout=False)
def ship(order: dict[str, Any]) -> dict[str, Any]:
    return order | {"shipped": True}


@shared_task(
    bind=True, max_retries=5, default_retry_delay=1, autoretry_for=(ConnectionError,), retry_backoff=1
)
def capture_payment(self: Any, number: int) -> int:
    if self.request.retries < 1:
        raise ConnectionError("the bank does not answer")
    return number


@shared_task(throws=(OutOfStock,))
def reserve(number: int, fails: bool = False) -> int:
    if fails:
        raise OutOfStock(number)
    return number


@shared_task(pydantic=True)
def validate(order: Order) -> Order:
    return Order(number=order.number, total=order.total * 2)


@shared_task(priority=9, queue="priority")
def rush(number: int) -> int:
    return number


@shared_task(bind=True)
def checkout(self: Any, number: int) -> Any:
    raise self.replace(chain(place.si(number), pay.s(5.0), ship.s()))


@shared_task
def total(prices: list[float]) -> float:
    return sum(prices)


@shared_task
def price(number: int) -> float:
    return number * 2.0


@shared_task
def invoice(numbers: list[int]) -> str:
    return str(chord([price.s(one) for one in numbers], total.s()).delay().id)


@shared_task(rate_limit="10/m")
def refund(number: int) -> int:
    return number


@shared_task(rate_limit="10/m")
def refund_all(numbers: list[int]) -> int:
    return len(numbers)


@shared_task(ignore_result=True)
def note(number: int) -> None:
    log.info("noted %s", number)
