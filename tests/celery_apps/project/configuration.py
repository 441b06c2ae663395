"""The project's settings. The variable SETUP says which of its deployments this is."""

import os
from typing import Any

from kombu import Exchange, Queue

EVERYWHERE: dict[str, Any] = {
    "broker_connection_retry_on_startup": True,
    "accept_content": ["json", "pickle"],
    "result_accept_content": ["json", "pickle"],
    "task_default_queue": "main",
    "task_queues": [
        Queue("main", Exchange("main"), routing_key="main"),
        Queue("letters", Exchange("post", type="topic"), routing_key="letters.#"),
        Queue("urgent", Exchange("main"), routing_key="urgent"),
    ],
    "task_routes": {
        "tests.celery_apps.project.tasks.routed": {"queue": "urgent"},
        "*.letter": {"queue": "letters", "routing_key": "letters.abroad"},
    },
    "task_annotations": {
        "tests.celery_apps.project.tasks.annotated": {"max_retries": 1, "default_retry_delay": 0},
    },
    "task_publish_retry": True,
    "worker_send_task_events": True,
    "broker_transport_options": {"visibility_timeout": 3600},
    "result_chord_join_timeout": 30.0,
    "result_expires": 3600,
}
DEPLOYMENTS: dict[str, dict[str, Any]] = {
    "main": {},
    "late": {
        "task_acks_late": True,
        "task_reject_on_worker_lost": True,
        "task_track_started": True,
        "result_extended": True,
        "worker_deduplicate_successful_tasks": True,
        "task_store_errors_even_if_ignored": True,
        "task_allow_error_cb_on_chord_header": True,
        "task_inherit_parent_priority": True,
        "task_default_priority": 3,
        "task_remote_tracebacks": False,
        "task_serializer": "pickle",
        "result_serializer": "pickle",
        "task_compression": "gzip",
        "result_compression": "gzip",
        "task_time_limit": 60,
        "task_soft_time_limit": 50,
        "enable_utc": False,
        "timezone": "Europe/Berlin",
    },
    "rpc": {"result_backend": "rpc://", "result_persistent": False},
    "database": {"database_create_tables_at_setup": True},
    "files": {},
    "cache": {"result_backend": "django-cache"},
    "django": {"result_backend": "django-db", "result_extended": True},
}
SETTINGS = EVERYWHERE | DEPLOYMENTS[os.environ.get("SETUP", "main")]
