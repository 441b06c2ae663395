"""The pool's settings as the slots machine needs them."""

from umbel.pools.interface import PoolSettings
from umbel.protocol.pool.events import SlotSettings


def slot_settings(settings: PoolSettings) -> SlotSettings:
    return SlotSettings(
        children=settings.concurrency,
        batch_max=settings.batch_max,
        batch_target_s=settings.batch_target_s,
        batch_patience_s=settings.batch_patience_s,
        start_timeout_s=settings.start_timeout_s,
        start_attempts=settings.start_attempts,
        stop_grace_s=settings.stop_grace_s,
        jobs_max=settings.max_tasks_per_child,
        memory_max_bytes=settings.max_memory_bytes,
        memory_hard_bytes=settings.max_memory_hard_bytes,
    )
