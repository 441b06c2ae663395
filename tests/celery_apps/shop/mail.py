"""Mail."""

# mypy: disable-error-code="untyped-decorator, misc"

from typing import Any

from celery import shared_task


@shared_task(bind=True, max_retries=3, soft_time_limit=20, time_limit=30)
def send(self: Any, to: str) -> str:
    print(f"mail to {to}")
    return f"{self.name} {to}"


@shared_task(ignore_result=True, expires=60)
def heartbeat() -> None: ...


@shared_task
def welcome(to: str) -> str:
    return to


@shared_task
def newsletter(to: str) -> str:
    return to


@shared_task
def reminder(to: str) -> str:
    return to


@shared_task
def password_reset(to: str) -> str:
    return to


@shared_task
def receipt(to: str) -> str:
    return to


@shared_task
def survey(to: str) -> str:
    return to


@shared_task
def digest(to: str) -> str:
    return to


@shared_task
def goodbye(to: str) -> str:
    return to
