"""The app. `SHOP_ODDITIES` adds what no worker but Celery's can run."""

import os

from celery import Celery

app = Celery("shop", loader=os.environ.get("SHOP_LOADER"))
app.config_from_object("tests.celery_apps.shop.celeryconfig")
app.autodiscover_tasks(
    [f"tests.celery_apps.shop.{part}" for part in ("orders", "mail", "reports", "stock", "media")],
    related_name=None,
)
if os.environ.get("SHOP_ODDITIES"):
    app.autodiscover_tasks(["tests.celery_apps.shop.oddities"], related_name=None)

import tests.celery_apps.shop.control  # noqa: E402, F401 (so that `celery control` knows its commands)
