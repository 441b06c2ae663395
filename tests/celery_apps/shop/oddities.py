"""What only Celery's own worker can run."""

# mypy: disable-error-code="misc, untyped-decorator"

from typing import Any

import click
from celery import bootsteps, signals
from celery.worker.request import Request

from tests.celery_apps.shop.celery import app


class Liveness(bootsteps.StartStopStep):
    requires = frozenset({"celery.worker.components:Timer"})


class PriceFeed(bootsteps.ConsumerStep):
    def get_consumers(self, channel: Any) -> list[Any]:
        return []


app.user_options["worker"].add(click.Option(("--till",)))
app.steps["worker"].add(Liveness)
app.steps["consumer"].add(PriceFeed)


class LoudRequest(Request):
    """Runs inside Celery's worker."""


@app.task(Request=LoudRequest)
def loud() -> None: ...


@signals.beat_init.connect
def start_the_clock(**_: Any) -> None: ...


app.conf.worker_direct = True
app.conf.worker_pool = "eventlet"
app.conf.worker_consumer = "tests.celery_apps.shop.oddities:Consumer"
app.conf.control_exchange = "shop"
app.conf.broker_transport_options = {"credential_provider": "tills.Keys"}
