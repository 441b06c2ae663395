"""Task attributes: what was said of a task when it was defined, readable under the names it was said by."""

from collections.abc import Mapping
from typing import Any

from umbel.app.options import TaskOptions
from umbel.protocol.delivery.limits import Concurrency, Rate


class TaskAttributes:
    """A base class may say the same as class attributes; the decorator's word comes before that."""

    options: TaskOptions

    @property
    def queue(self) -> str | None:
        return self.options.queue

    @property
    def priority(self) -> int | None:
        return self.options.priority

    @property
    def acks_late(self) -> bool | None:
        """None: as the app is set."""
        early = self.options.acks_early
        return None if early is None else not early

    @property
    def ignore_result(self) -> bool | None:
        """None: as the app is set."""
        return self.options.ignore_result

    @property
    def autoretry_for(self) -> tuple[type[BaseException], ...]:
        return self.options.autoretry_for

    @property
    def dont_autoretry_for(self) -> tuple[type[BaseException], ...]:
        return self.options.dont_autoretry_for

    @property
    def retry_kwargs(self) -> Mapping[str, Any]:
        return self.options.retry_kwargs

    @property
    def max_retries(self) -> int | None:
        """None: for ever."""
        return self.options.retry.max_retries

    @property
    def default_retry_delay(self) -> float:
        return self.options.retry.delay_s

    @property
    def retry_backoff(self) -> bool | float:
        return self.options.retry.backoff_s or False

    @property
    def retry_backoff_max(self) -> float:
        return self.options.retry.backoff_max_s

    @property
    def retry_jitter(self) -> bool:
        return self.options.retry.jitter

    @property
    def throws(self) -> tuple[type[BaseException], ...]:
        return self.options.throws

    @property
    def rate_limit(self) -> str | float | None:
        return self.options.rate_limit

    @property
    def limit(self) -> Rate | Concurrency | None:
        return self.options.limit

    @property
    def time_limit(self) -> float | None:
        return self.options.time_limit_s

    @property
    def soft_time_limit(self) -> float | None:
        return self.options.soft_time_limit_s

    @property
    def expires(self) -> float | None:
        return self.options.expires_s

    @property
    def serializer(self) -> str | None:
        return self.options.serializer

    @property
    def track_started(self) -> bool:
        return self.options.track_started

    @property
    def typing(self) -> bool:
        return self.options.typing
