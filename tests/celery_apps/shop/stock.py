"""Stock."""

# mypy: disable-error-code="untyped-decorator, misc"

from celery import shared_task

from tests.celery_apps.shop.bases import Audited


@shared_task(name="stock.count", typing=False)
def count(*items: str) -> int:
    return len(items)


@shared_task(base=Audited)
def restock(item: str = "") -> str:
    return item


@shared_task(base=Audited)
def reserve_item(item: str = "") -> str:
    return item


@shared_task(base=Audited)
def release_item(item: str = "") -> str:
    return item


@shared_task(base=Audited)
def move(item: str = "") -> str:
    return item


@shared_task(base=Audited)
def inventory(item: str = "") -> str:
    return item


@shared_task(base=Audited)
def reorder(item: str = "") -> str:
    return item


@shared_task(base=Audited)
def expire(item: str = "") -> str:
    return item


@shared_task(base=Audited)
def audit_item(item: str = "") -> str:
    return item
