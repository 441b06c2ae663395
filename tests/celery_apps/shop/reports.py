"""Reports: long, and rarely."""

# mypy: disable-error-code="untyped-decorator, misc"

from celery import shared_task


@shared_task(time_limit=900, soft_time_limit=850, track_started=True)
def nightly() -> str:
    return "done"


@shared_task(store_errors_even_if_ignored=True, ignore_result=True)
def crash() -> None:
    raise RuntimeError("the report is broken")


@shared_task
def sales(day: str = "today") -> str:
    return day


@shared_task
def returns(day: str = "today") -> str:
    return day


@shared_task
def visits(day: str = "today") -> str:
    return day


@shared_task
def stock_levels(day: str = "today") -> str:
    return day


@shared_task
def top_customers(day: str = "today") -> str:
    return day


@shared_task
def tax(day: str = "today") -> str:
    return day


@shared_task
def cohorts(day: str = "today") -> str:
    return day
