"""The settings, as a module of plain names."""

import os
from datetime import timedelta

from celery.schedules import crontab
from kombu import Exchange, Queue

broker_url = os.environ.get("SHOP_BROKER", "redis://:secret@localhost:6379/0")
result_backend = os.environ.get("SHOP_RESULTS", broker_url)
broker_transport_options = {
    "visibility_timeout": 7200,
    "queue_order_strategy": "priority",
    "global_keyprefix": "shop:",
}
result_backend_transport_options = {"global_keyprefix": "outcomes:"}
broker_connection_retry_on_startup = True
imports = ("tests.celery_apps.shop.signals",)

orders = Exchange("orders", type="direct")
events = Exchange("events", type="topic")
news = Exchange("news", type="fanout")

task_default_queue = "default"
task_queues = [
    Queue("default", Exchange("default"), routing_key="default"),
    Queue("orders", orders, routing_key="orders"),
    Queue("refunds", orders, routing_key="refunds"),
    Queue("priority", Exchange("priority"), routing_key="priority", queue_arguments={"x-max-priority": 10}),
    Queue("mail", events, routing_key="mail.#"),
    Queue("audit", events, routing_key="#"),
    Queue("reports", Exchange("reports"), routing_key="reports"),
    Queue("stock", Exchange("stock"), routing_key="stock"),
    Queue("media", Exchange("media"), routing_key="media"),
]
if os.environ.get("SHOP_NEWS"):
    task_queues.append(Queue("news", news))
task_routes = {
    "tests.celery_apps.shop.orders.*": {"queue": "orders"},
    "tests.celery_apps.shop.orders.refund*": {"queue": "refunds"},
    "tests.celery_apps.shop.mail.*": {"queue": "mail", "routing_key": "mail.out"},
    "tests.celery_apps.shop.reports.*": {"queue": "reports"},
    "tests.celery_apps.shop.stock.*": {"queue": "stock"},
    "tests.celery_apps.shop.media.*": {"queue": "media"},
}

task_serializer = "json"
accept_content = ["json"]
result_expires = timedelta(hours=6)
result_extended = True
task_track_started = True
task_time_limit = 300
task_soft_time_limit = 240
task_default_rate_limit = "1000/s"
task_annotations = {"tests.celery_apps.shop.reports.nightly": {"time_limit": 600}}
timezone = "Europe/Berlin"

worker_pool = os.environ.get("SHOP_POOL", "prefork")
worker_prefetch_multiplier = 1
worker_max_tasks_per_child = 500
worker_max_memory_per_child = 400_000
worker_send_task_events = True
worker_log_format = "SHOP %(levelname)s %(name)s %(message)s"
worker_task_log_format = "SHOPTASK %(levelname)s %(task_name)s %(message)s"
worker_redirect_stdouts_level = "ERROR"
worker_state_db = "/tmp/shop-state"

beat_schedule = {
    "nightly-report": {
        "task": "tests.celery_apps.shop.reports.nightly",
        "schedule": crontab(hour=2, minute=30),
    },
    "restock": {"task": "tests.celery_apps.shop.stock.restock", "schedule": timedelta(minutes=15)},
    "heartbeat": {
        "task": "tests.celery_apps.shop.mail.heartbeat",
        "schedule": 30.0,
        "options": {"expires": 15},
    },
    "forgotten": {"task": "tests.celery_apps.shop.gone.task", "schedule": 3600.0},
}
