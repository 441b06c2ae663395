"""What each setting means, in words: for the documents, so that no app and no worker loads it."""

from collections.abc import Mapping

HELP: Mapping[str, str] = {
    "broker": "an address of [brokers.md](brokers.md); several for fail-over, with `;`",
    "backend": "where results live: an address, or `rpc://`",
    "connect_timeout_s": "for the broker to answer, or the embedded one's file to be free",
    "broker_connection_wait_s": (
        "a worker that starts waits so long for a broker that is not up yet, then ends with 69; 0: not at all"
    ),
    "publish_timeout_s": "while the broker is away a sender waits so long; 0: not at all",
    "publish_buffer_max": "messages that a running task may keep meanwhile",
    "message_max_bytes": "a larger message is refused, by senders and workers",
    "signing_keys": "`ID:SECRET`: the first signs what is sent, all verify: see [security](security.md)",
    "signing_window_s": "a signed task may wait so long after it was sent or due; a week at most",
    "accept_unsigned": "queues whose messages need no signature, for Celery's clients; `*`: all",
    "lease_s": "a worker silent for so long loses its messages to the others",
    "storage_max_bytes": "of the embedded broker's file",
    "history_lake": "the folder of the [history](history.md), from where the command runs",
    "lake_mode": (
        "who may read the lake: its folders get this mode, its files the same without the right to execute; "
        "`0750` lets the group read"
    ),
    "worker_record": "the worker's `--record`: write the history when no one else does",
    "event_log_max": "events kept for those who record them",
    "event_log_retention_s": "and for how long",
    "task_default_queue": "where tasks without a queue of their own go",
    "task_default_priority": "0 to 9",
    "task_routes": "queues, and options, by patterns of task names",
    "task_serializer": "or `msgpack`, `pickle`",
    "accept_content": "what workers read; the others only if named here",
    "task_ignore_result": "store no results",
    "task_acks_late": "false: a task is acknowledged before it runs, unless it says otherwise",
    "task_time_limit_s": "ends the process of a task without a limit of its own",
    "task_soft_time_limit_s": "raises in it",
    "task_max_deliveries": "starts that end in a dead process, before the dead letters",
    "task_repr_max_chars": "arguments and results are shown up to here, in events, logs and headers",
    "task_traceback_max_bytes": "of a longer traceback the end is kept",
    "task_allow_join": "let tasks wait for other tasks' results",
    "task_always_eager": "run tasks where they are sent",
    "task_send_events": "workers tell of each step of a task, as with `-E`",
    "task_send_sent_event": "clients tell that they sent one",
    "result_expires_s": "how long results are kept",
    "result_extended": "store name, arguments, worker, retries and queue with them",
    "worker_concurrency": "how many tasks at once; 100 by default in green pools",
    "worker_pool": "or `asyncio`, `gevent`, `threads`, `solo`: see [pools](pools.md)",
    "worker_loop": "the event loop of a worker; `auto`: uvloop's where it is installed",
    "worker_gevent_children": "how many processes share the greenlets of the `gevent` pool",
    "worker_queues": "what to consume",
    "worker_prefetch_max": "messages that a worker holds at most, running and waiting",
    "worker_grace_s": "a stopping worker waits so long for what runs",
    "worker_soft_grace_s": "told twice to stop, it interrupts what runs and waits so long",
    "worker_hook_timeout_s": (
        "a worker waits so long for your `worker_init`, `worker_ready` and `worker_shutdown`, each, and goes "
        "on without a hook that takes longer"
    ),
    "worker_child_start": (
        "fork children from the loaded app, or `spawn` them where its threads or sockets forbid "
        "that; `fork` and `spawn` decide it"
    ),
    "worker_autoscale": (
        "`[10, 3]`: between 3 and 10 children, as there is work; takes the place of `worker_concurrency`"
    ),
    "worker_autoscale_cool_down_s": "children that were of no use for so long go",
    "worker_redirect_stdouts": (
        "in child processes, what a task prints is a line of the log that names the task"
    ),
    "worker_redirect_stdouts_level": "at this level",
    "worker_pool_restarts": (
        "allow the command `pool_restart`, which replaces all children one by one, with `reload` "
        "from the app loaded anew"
    ),
    "worker_start_timeout_s": (
        "a child that is not ready after so long is killed; so is the start of a worker"
    ),
    "worker_start_attempts": (
        "so many failed starts in a row, with no child left, and the worker ends with the reason "
        "(3 if there never was one)"
    ),
    "worker_max_tasks_per_child": "a child that has run so many tasks is replaced",
    "worker_max_memory_per_child": (
        "a child that holds more is replaced when its task has ended; a number is in KiB as "
        'Celery has it, `"200MB"` and `"1GiB"` say their unit'
    ),
    "worker_max_memory_hard": (
        "a child that holds more is killed; its task is returned, and ends among the dead letters "
        "after `task_max_deliveries` starts"
    ),
    "control_mailbox": (
        "`own`: remote control has a connection and a thread of its own, `shared`: the worker's; "
        "`auto`: its own where the pool is green"
    ),
    "control_allow": "the commands that a worker obeys: also `read-only`, and names",
    "heartbeat_interval_s": (
        "at least; longer in clusters of more than 400. Also how long an unread heartbeat is kept"
    ),
    "without_heartbeat": "say nothing",
    "without_mingle": "do not say hello at the start",
    "mingle_wait_s": "wait so long for the others' hello, at most",
    "without_gossip": 'do not listen to the others; with `election_protocol = "v1"` also no elections',
    "gossip_mode": "`full`: everybody hears every heartbeat; `observed`: three do it for all",
    "gossip_interval_s": (
        "how often silent and lost nodes are looked for, and the mode and the observers; unset: a node is "
        "found silent or lost without waiting for a look, and the rest is looked at every 5 s"
    ),
    "scheduler_lease_s": ("a worker that sends periodic tasks and dies is replaced after so long, at most"),
    "election_protocol": "`v1`: Celery's rules, by events alone",
    "election_v1_compat": (
        "in an election that a Celery client starts, speak `v1` too while Celery's workers are "
        "there; or `always`, `never`"
    ),
}
"""In the order in which people look for them."""
