"""Where an unmodified Celery project behaves otherwise under `umbel worker`: case -> why.

`case on setup` is about that deployment alone, `case on rabbitmq` about that broker.
`docs/celery.md` shows this table. A case that is listed must really differ: one that does not any more
fails the test, and its line goes.
"""

_ONCE = (
    "Celery 5.7 marks a task past its hard limit as failed twice, so errbacks are called and `task_failure` "
    "is sent twice; here once. `task_postrun` is not sent for a task whose process was killed."
)

DIFFERENCES: dict[str, str] = {
    "errback_after_a_hard_limit": _ONCE,
    "old_errback_after_a_hard_limit": _ONCE,
    "signals_of_a_hard_limit": _ONCE,
    "revoked_before_it_is_due on late": (
        "With `task_serializer = 'pickle'` Celery's clients pickle their control requests, too; "
        "this worker reads JSON alone there, so a revoke is not heard."
    ),
    "signals_of_the_worker": (
        "`worker_init` is sent in the process that forks the children, so that Django gives each of them "
        "its own connections; `celeryd_after_setup` of the main process comes before it."
    ),
    "words_about_a_lost_process": "The text of WorkerLostError says which process was lost and how.",
    "names_of_properties": (
        "request.properties holds what the sender set: kombu's own notes (`delivery_tag`, `delivery_info`, "
        "`body_encoding`) are not there."
    ),
}
