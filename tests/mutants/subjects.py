"""Subjects: the modules whose tests are themselves tested, and the tests that guard each.

Of a module that also holds what other tests guard, sections are named, by their headers; only they are
changed. The guards of one module take less than a minute together; the quickest comes first, because a mutant
is killed by the first test that fails.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Subject:
    path: str  # below src/umbel
    guards: tuple[str, ...]  # what pytest is given, below tests
    sections: tuple[str, ...] = ()  # the parts that are changed; none: the whole file


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
    Subject(
        "protocol/delivery/delivery.py",
        ("protocol/test_delivery.py", "protocol/test_ending.py"),
        ("delivery", "ending"),
    ),
    Subject(
        "protocol/delivery/limits.py",
        ("protocol/test_limits.py",),
        ("limits that hold for the whole cluster",),
    ),
    Subject("brokers/sqlite/limits.py", ("brokers/test_sqlite.py",), ("limits for the whole cluster",)),
    Subject(
        "worker/delivery/admit.py",
        ("worker/test_judging.py", "worker/test_verification.py", "worker/test_admission.py"),
        ("admission",),
    ),
    Subject(
        "worker/delivery/end.py",
        ("worker/test_endings.py", "worker/test_endings_kept.py", "worker/test_endings_faults.py"),
    ),
    Subject("worker/delivery/settle.py", ("worker/test_settling_order.py", "worker/test_settling.py")),
    Subject("wire/retried.py", ("wire/test_retried.py",)),
    Subject("control/failures.py", ("app/test_failures.py",)),
    Subject("patterns.py", ("test_patterns.py",)),
    Subject("wire/control.py", ("web/test_odd_replies.py", "monitor/test_decisions.py"), ("replies",)),
    Subject("events/state.py", ("monitor/test_memory.py", "events/test_state.py"), ("memory",)),
    Subject("events/precedence.py", ("events/test_precedence.py",)),
    Subject("events/merge.py", ("events/test_registers.py", "events/test_merge.py"), ("merge",)),
    Subject("fold/registers.py", ("fold/test_kernel.py", "fold/test_crowded.py")),
    Subject("fold/tasks.py", ("fold/test_kernel.py",), ("view", "tasks", "attempts", "timeline")),
    Subject("fold/senders.py", ("fold/test_marks.py",)),
    Subject("fold/buckets.py", ("fold/test_buckets.py",), ("buckets",)),
    Subject("protocol/leadership/lease.py", ("protocol/test_lease.py",), ("lease", "events", "effects")),
    *(Subject(f"protocol/pool/{name}.py", _SLOTS) for name in ("slots", "fleet")),
    Subject("app/running/follow_ups.py", ("app/test_chords.py", "app/test_groups.py"), ("parts of a chord",)),
    Subject(
        "app/running/tracer.py",
        (
            "app/test_tracer_outcomes.py",
            "app/test_tracer.py",
            "app/test_retries.py",
            "app/test_signals.py",
            "app/test_sensitive.py",
        ),
        ("the tracer",),
    ),
    Subject(
        "brokers/rules.py",
        ("brokers/test_sqlite_claims.py", "brokers/test_sqlite_rules.py"),
        ("turns and shares", "verdicts"),
    ),
    Subject(
        "brokers/sqlite/claims.py",
        ("brokers/test_sqlite_claims.py", "brokers/test_sqlite_rules.py", "brokers/test_sqlite.py"),
        ("claims",),
    ),
    Subject("brokers/redis/claims.py", _REDIS),
    Subject("brokers/redis/holding.py", ("brokers/test_redis_large.py",), ("large messages",)),
    Subject(
        "brokers/amqp/claims.py",
        ("brokers/test_amqp_claims.py", "brokers/test_amqp_deliveries.py", "brokers/test_amqp.py"),
    ),
    *(
        Subject(f"brokers/redis/{name}.lua", guards)
        for guards, names in (
            (
                (*_SCRIPTS, "brokers/test_redis_refusals.py", "brokers/test_redis_large.py"),
                ("claims", "owners"),
            ),
            ((*_SCRIPTS, *_SETTLE), ("messages",)),
            (_SETTLE, ("settle",)),
            (("brokers/test_redis_scripts_limits.py", "brokers/test_redis_large.py"), ("limits",)),
            (_SCRIPTS, ("queues",)),
            ((*_SCRIPTS, "brokers/test_redis.py"), ("cluster",)),  # with the contract of signatures
            ((*_SCRIPTS, "backends/test_redis.py"), ("results",)),
            ((*_SCRIPTS, "brokers/test_redis_coordination.py"), ("coordination",)),
        )
        for name in names
    ),
)
