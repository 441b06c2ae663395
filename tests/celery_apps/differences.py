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
    "request_in_another_queue on rabbitmq": (
        "A message without a priority has priority 0 in `request.delivery_info`, where Celery on RabbitMQ "
        "says None if the sender named a queue."
    ),
    "words_about_a_lost_process": "The text of WorkerLostError says which process was lost and how.",
    "names_of_properties": (
        "request.properties holds what the sender set: kombu's own notes (`delivery_tag`, `delivery_info`, "
        "`body_encoding`) are not there."
    ),
}
