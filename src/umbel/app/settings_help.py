"""What each setting means: for the documents, so that no app and no worker loads it."""

from collections.abc import Mapping

HELP: Mapping[str, str] = {
    "broker": "address of the broker, see [brokers](brokers.md); separate several with `;` for failover",
    "backend": "address of the result backend, or `rpc://`",
    "coordination_store": (
        "address of a second broker for what [Google Pub/Sub](brokers.md#google-pubsub) cannot do: leases, "
        "elections, delayed and unique tasks, limits"
    ),
    "connect_timeout_s": "seconds for the broker to answer, or for the embedded broker's file to be unlocked",
    "broker_connection_wait_s": (
        "seconds that a starting worker waits for an unavailable broker before it exits with 69; 0: do "
        "not wait"
    ),
    "publish_timeout_s": "seconds that a sender waits for an unavailable broker; 0: do not wait",
    "publish_buffer_max": "most messages that a running task may buffer while the broker is unavailable",
    "message_max_bytes": "senders and workers refuse larger messages",
    "signing_keys": "`ID:SECRET` entries; the first key signs, all keys verify: see [security](security.md)",
    "signing_cluster": "the id of this cluster, which signatures are bound to; empty: the one that its "
    "broker has (`umbel cluster-id`)",
    "signing_window_s": "seconds that a signed task stays valid after it was sent or due; a week at most",
    "signing_accept_unbound": "verify what Umbel 0.3 signed, for `signing_window_s` after the cluster's id "
    "was made; the next release has this off",
    "accept_unsigned": "queues whose messages need no signature, for Celery clients; `*`: all queues",
    "lease_s": "seconds of silence after which a worker's messages are redelivered to other workers",
    "storage_max_bytes": "size limit of the embedded broker's file",
    "history_lake": "folder of the [history](history.md), relative to the working directory, or `s3://bucket/prefix`",
    "lake_mode": (
        "mode of the lake's folders; files get the same mode without execute permission; `0750` lets the "
        "group read"
    ),
    "worker_record": "have the history recorded if no other recorder runs, as with `--record`",
    "worker_metrics": "serve metrics for Prometheus at this port or HOST:PORT, as with `--metrics`",
    "outbox": (
        "address of the database with the [outbox](outbox.md), or a list of them: `postgresql://...`, "
        "`sqlite:///file`; workers publish what is written there"
    ),
    "outbox_table": "name of the outbox's table, with its schema if the search path does not have it",
    "outbox_poll_s": "most seconds between two looks into an outbox that is empty",
    "event_log_max": "most events that the broker keeps for recorders",
    "event_log_retention_s": "seconds that the broker keeps events for recorders",
    "revokes_max": (
        "most revokes in force; at this limit more are refused with `RevokesFull`. Each worker holds all of "
        "them in memory, about 300 bytes each"
    ),
    "revoke_retention_s": (
        "seconds that a revoke holds; longer than the longest delay of a task that you may revoke. On "
        "RabbitMQ more than a week [needs a new stream](brokers.md#limits-of-rabbitmq)"
    ),
    "task_default_queue": "queue for tasks that name none",
    "task_default_priority": "0 to 9",
    "task_routes": "queue and options by patterns of task names",
    "task_serializer": "how arguments are encoded",
    "accept_content": "serializers that workers accept; others are refused",
    "task_ignore_result": "store no results",
    "task_acks_late": (
        "true: acknowledge a message after its task has run; false: before; a task's own option wins"
    ),
    "task_time_limit_s": "seconds after which the process of a task is killed; a task's own option wins",
    "task_soft_time_limit_s": "seconds after which `SoftTimeLimitExceeded` is raised in the task",
    "task_max_deliveries": "starts that may end with a dead process before the task becomes a dead letter",
    "task_repr_max_chars": "length to which arguments and results are cut in events, logs and headers",
    "task_traceback_max_bytes": "of a longer traceback only the end is kept",
    "task_allow_join": "let tasks wait for the results of other tasks",
    "task_always_eager": "run tasks in the process that sends them, at once",
    "task_send_events": "workers send an event at every step of a task, as with `-E`",
    "task_send_sent_event": "clients send an event for every task they send",
    "result_expires_s": "seconds that results are kept",
    "result_extended": "store name, arguments, worker, retries and queue with each result",
    "failed_keep": (
        "messages of failed tasks that the broker keeps, so that they can be [retried](failures.md); the "
        "oldest make room; 0: none"
    ),
    "failed_keep_s": "seconds that they are kept; 49 days at most",
    "failed_keep_max_bytes": "size of the largest message of a failed task that is kept",
    "worker_concurrency": "tasks that run at once; default: one per core, 100 in green pools",
    "worker_pool": "where tasks run: see [pools](pools.md)",
    "worker_loop": "event loop of a worker; `auto`: uvloop if it is installed",
    "worker_gevent_children": "child processes that share the greenlets of the `gevent` pool",
    "worker_queues": "queues to consume",
    "worker_prefetch_max": "most messages that a worker claims, running and waiting",
    "worker_grace_s": "seconds that a stopping worker waits for running tasks",
    "worker_soft_grace_s": (
        "seconds that a worker waits after a second stop signal, when it has interrupted the running tasks"
    ),
    "worker_hook_timeout_s": (
        "seconds for each of your `worker_init`, `worker_ready` and `worker_shutdown` hooks; the worker "
        "goes on without a slower one"
    ),
    "worker_child_start": (
        "how child processes start; `auto`: fork from the loaded app, or spawn if its threads or sockets "
        "make a fork unsafe"
    ),
    "worker_autoscale": "`[10, 3]`: between 3 and 10 child processes, by load; replaces `worker_concurrency`",
    "worker_autoscale_cool_down_s": "seconds without work after which a surplus child process is stopped",
    "worker_redirect_stdouts": "log what tasks print in child processes, with the name of the task",
    "worker_redirect_stdouts_level": "level of these log lines",
    "worker_log_successes": (
        "log each task that succeeds, with its run time and result, as `umbel dev` does; limited in rate, "
        "like all lines about tasks"
    ),
    "worker_pool_restarts": (
        "allow the command `pool_restart`, which replaces all child processes one by one; with `reload` "
        "it loads the app again"
    ),
    "worker_start_timeout_s": (
        "seconds for a child process to become ready before it is killed; also the limit for the start of"
        " a worker"
    ),
    "worker_start_attempts": (
        "failed starts in a row, with no child process left, after which the worker exits with the "
        "reason; 3 if no child process ever started"
    ),
    "worker_max_tasks_per_child": "replace a child process after this many tasks",
    "worker_max_memory_per_child": (
        "replace a child process that uses more memory, after its task; a plain number is in KiB, as in "
        'Celery; `"200MB"` and `"1GiB"` name their unit'
    ),
    "worker_max_memory_hard": (
        "kill a child process that uses more memory; its task is redelivered, and becomes a dead letter "
        "after `task_max_deliveries` starts"
    ),
    "control_mailbox": (
        "connection and thread of remote control; `own`: separate, `shared`: the worker's, `auto`: "
        "separate in green pools"
    ),
    "control_allow": "remote control commands that a worker accepts: `all`, `read-only`, or names",
    "heartbeat_interval_s": (
        "least interval between heartbeats; longer in clusters of more than 400 nodes. Unread heartbeats "
        "expire after the same time"
    ),
    "without_heartbeat": "send no heartbeats",
    "without_mingle": "do not exchange state with other nodes at the start",
    "mingle_wait_s": "most seconds to wait for other nodes' answers at the start",
    "without_gossip": (
        'do not listen to the events of other nodes; with `election_protocol = "v1"` also no elections'
    ),
    "gossip_mode": "`full`: every node reads every heartbeat; `observed`: three nodes read them for all",
    "gossip_interval_s": (
        "how often to look for silent and lost nodes, and to review mode and observers; unset: silent and"
        " lost nodes are found at once, the rest is reviewed every 5 s"
    ),
    "without_schedule": "this worker never sends the periodic tasks",
    "scheduler_lease_s": "most seconds until a dead sender of periodic tasks is replaced",
    "election_protocol": "`v1`: Celery's rules, by events alone",
    "election_v1_compat": (
        "speak `v1` too in elections that a Celery client starts; `auto`: while Celery workers are in the"
        " cluster"
    ),
}
"""In the order in which people look for them."""
