"""Subjects: the modules whose tests are themselves tested, and the tests that guard each.

The guards of one module take less than a minute together; the quickest comes first, because a mutant
is killed by the first test that fails.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Subject:
    path: str  # below src/umbel
    guards: tuple[str, ...]  # what pytest is given, below tests


_SLOTS = (
    "protocol/test_slots.py",
    "protocol/test_slots_interrupt.py",
    "protocol/test_slot_parts.py",
    "protocol/test_slots_random.py",
)
_REDIS = (
    "brokers/test_redis_claims.py",
    "brokers/test_redis_leases.py",
    "brokers/test_redis_settle.py",
    "brokers/test_redis_pages.py",
    "brokers/test_redis_refusals.py",
    "brokers/test_redis_delayed.py",
    "brokers/test_redis_handoff.py",
    "brokers/test_redis_cuts.py",
    "brokers/test_replaced.py",
    "brokers/test_redis.py",
    "brokers/test_redis_handoff_faults.py",
)
_SCRIPTS = tuple(
    f"brokers/test_redis_scripts_{part}.py"
    for part in ("claims", "owners", "stores", "queues", "pauses", "results", "elections", "limits")
)
_SETTLE = (
    "brokers/test_redis_settle.py",
    "brokers/test_redis_pages.py",
    "brokers/test_redis_refusals.py",
    "brokers/test_redis_layout.py",
    "brokers/test_redis_large.py",
)

SUBJECTS = (
    Subject("protocol/delivery/delivery.py", ("protocol/test_delivery.py", "protocol/test_ending.py")),
    Subject("protocol/delivery/ending.py", ("protocol/test_ending.py",)),
    Subject("protocol/delivery/limits.py", ("protocol/test_limits.py",)),
    Subject("brokers/sqlite/limits.py", ("brokers/test_sqlite.py",)),
    Subject(
        "worker/messages/admission.py",
        ("worker/test_judging.py", "worker/test_verification.py", "worker/test_admission.py"),
    ),
    *(
        Subject(
            f"worker/messages/{name}.py",
            ("worker/test_endings.py", "worker/test_endings_kept.py", "worker/test_endings_faults.py"),
        )
        for name in ("endings", "remains", "refused_parts")
    ),
    *(
        Subject(f"worker/messages/{name}.py", ("worker/test_settling_order.py", "worker/test_settling.py"))
        for name in ("settling", "before_settling", "after_settling")
    ),
    Subject("wire/retried.py", ("wire/test_retried.py",)),
    Subject("coordination/failures.py", ("app/test_failures.py",)),
    Subject("events/precedence.py", ("events/test_precedence.py",)),
    Subject("events/merge.py", ("events/test_registers.py", "events/test_merge.py")),
    *(
        Subject(f"fold/{name}.py", ("fold/test_kernel.py",))
        for name in ("order", "registers", "view", "tasks", "attempts", "timeline")
    ),
    Subject("fold/marks.py", ("fold/test_marks.py",)),
    Subject("fold/buckets.py", ("fold/test_buckets.py",)),
    Subject("fold/crowded.py", ("fold/test_crowded.py",)),
    Subject("protocol/leadership/lease.py", ("protocol/test_lease.py",)),
    *(Subject(f"protocol/pool/{name}.py", _SLOTS) for name in ("slots", "child", "fleet", "starts")),
    Subject("app/running/chord_parts.py", ("app/test_chords.py", "app/test_groups.py")),
    Subject(
        "app/running/tracer.py",
        (
            "app/test_tracer_outcomes.py",
            "app/test_tracer.py",
            "app/test_retries.py",
            "app/test_signals.py",
            "app/test_sensitive.py",
        ),
    ),
    Subject(
        "brokers/sqlite/claims.py",
        ("brokers/test_sqlite_claims.py", "brokers/test_sqlite_rules.py", "brokers/test_sqlite.py"),
    ),
    Subject("brokers/redis/claims.py", _REDIS),
    Subject("brokers/redis/large.py", ("brokers/test_redis_large.py",)),
    Subject(
        "brokers/amqp/claims.py",
        ("brokers/test_amqp_claims.py", "brokers/test_amqp_deliveries.py", "brokers/test_amqp.py"),
    ),
    *(
        Subject(f"brokers/redis/{name}.lua", guards)
        for guards, names in (
            (
                (*_SCRIPTS, "brokers/test_redis_refusals.py", "brokers/test_redis_large.py"),
                ("claim", "owners", "adopt", "abandon", "reconcile", "holding", "returning", "refusals"),
            ),
            ((*_SCRIPTS, *_SETTLE), ("marks",)),
            (_SETTLE, ("settle",)),
            ((*_SCRIPTS, "brokers/test_redis.py"), ("spend",)),  # with the contract of signatures
            (("brokers/test_redis_scripts_limits.py", "brokers/test_redis_large.py"), ("limit",)),
            (
                _SCRIPTS,
                (
                    "depths",
                    "publish",
                    "publish_once",
                    "bury",
                    "requeue",
                    "move",
                    "revoke",
                    "event_log",
                    "unique",
                    "askers",
                ),
            ),
            ((*_SCRIPTS, "backends/test_redis.py"), ("results", "store", "chord")),
            (
                (*_SCRIPTS, "brokers/test_redis_coordination.py"),
                ("coordination", "election", "lease"),
            ),
        )
        for name in names
    ),
)
