"""Request: the facts about the running call, for the task's code.

The current request is in a context variable, so each thread and each coroutine has the right one. A task that
is called as a plain function has an empty request with `called_directly` set.
"""

from collections.abc import Callable, Iterable
from contextvars import ContextVar
from itertools import islice
from typing import TYPE_CHECKING, Any

import msgspec

from umbel.app.options import TaskOptions
from umbel.app.settings import Settings
from umbel.pools.interface import UserEvent
from umbel.protocol.delivery.trust import UNSIGNED
from umbel.wire.call import TaskCall, TaskHeaders
from umbel.wire.message import Outgoing
from umbel.wire.steps import SignatureMap, step_map

if TYPE_CHECKING:
    from umbel.app.running.progress import Reports
    from umbel.protocol.delivery.sensitive import Secrets

EventSender = Callable[[UserEvent], None]


class Request(msgspec.Struct):
    """The call that a task runs: the fields of its message, and what the run has sent so far."""

    id: str = ""
    task: str = ""
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    retries: int = 0
    root_id: str | None = None
    parent_id: str | None = None
    group: str | None = None
    group_index: int | None = None
    eta: str | None = None
    expires: str | None = None
    timelimit: tuple[float | None, float | None] = (None, None)
    hostname: str = ""
    delivery_info: dict[str, Any] = {}
    reply_to: str = ""
    headers: dict[str, Any] = {}
    called_directly: bool = True
    is_eager: bool = False
    children: list[str] = []
    call: TaskCall | None = None
    unsent: list[Outgoing] = []  # buffered while the broker is unavailable
    try_again_at: float = 0.0  # on the monotonic clock
    reports: "Reports | None" = None  # of its states and events; made with the first
    send_event: EventSender | None = None  # to the worker; None outside of workers
    number: int = 0  # of its job in the pool
    clock: int = 0  # the node's Lamport time when the task was given to a child
    secrets: "Secrets | None" = None  # of its sensitive arguments
    added_parts: int = 0  # to its chord, by `add_to_chord`
    # A cluster id. UNSIGNED: its message was unsigned. None: the cluster for which the process signs.
    signs_for: str | None = None

    @property
    def time_limit(self) -> float | None:
        """The hard time limit in seconds that the message states."""
        return self.timelimit[0]

    @property
    def soft_time_limit(self) -> float | None:
        """The soft time limit in seconds that the message states."""
        return self.timelimit[1]

    @property
    def correlation_id(self) -> str:
        """The task's id, under the name of the message property."""
        return self.id

    @property
    def properties(self) -> dict[str, Any]:
        """The properties of the message in the broker."""
        return {
            "correlation_id": self.id,
            "reply_to": self.reply_to,
            "delivery_mode": PERSISTENT,
            "priority": self.delivery_info.get("priority", 0),
            "delivery_info": self.delivery_info,
        }

    @property
    def callbacks(self) -> list[SignatureMap] | None:
        """The maps of the signatures in `link`."""
        return self.call.embed.callbacks if self.call else None

    @property
    def errbacks(self) -> list[SignatureMap] | None:
        """The maps of the signatures in `link_error`."""
        return self.call.embed.errbacks if self.call else None

    @property
    def chain(self) -> list[SignatureMap] | None:
        """The steps behind this one, the next one last."""
        chain = self.call.embed.chain if self.call else None
        return None if chain is None else [step_map(step) for step in chain]

    @property
    def chord(self) -> SignatureMap | None:
        """The body of the chord that this task is a part of."""
        return self.call.embed.chord if self.call else None

    @property
    def stamps(self) -> dict[str, Any]:
        """The values of its stamps, by header name."""
        return self.call.headers.stamps if self.call else {}

    @property
    def stamped_headers(self) -> list[str] | None:
        """The names of its stamps; None without any."""
        return self.call.headers.stamped_headers if self.call else None

    @property
    def replaced_task_nesting(self) -> int:
        """How many replacements led to this task."""
        return self.call.headers.replaced_task_nesting if self.call else 0

    @property
    def shadow(self) -> str | None:
        """The name that logs show in place of the task's; None without one."""
        return self.call.headers.shadow if self.call else None

    @property
    def origin(self) -> str:
        """The node or client that sent the call."""
        return self.call.headers.origin if self.call else ""

    @property
    def ignore_result(self) -> bool | None:
        """Whether the message asks for the result to be ignored; None if it does not say."""
        return self.call.headers.ignore_result if self.call else None

    def get(self, name: str, default: Any = None) -> Any:
        """An attribute by its name, as in Celery."""
        return getattr(self, name, default)

    def sent(self, task_ids: Iterable[str]) -> None:
        """Record tasks that this task has sent, up to CHILDREN_MAX."""
        self.children.extend(islice(task_ids, max(0, CHILDREN_MAX - len(self.children))))


PERSISTENT = 2  # AMQP's delivery mode for messages that outlive a restart of the broker
CHILDREN_MAX = 1000  # ids of sent tasks that a result lists; the rest are sent but not listed

CURRENT_REQUEST: ContextVar[Request | None] = ContextVar("umbel_request", default=None)
_UNSIGNED_RUNS: dict[int, Request] = {}
"""The running tasks of this process whose messages were unsigned, by `id()` of their requests."""


def current_request() -> Request | None:
    """The request of the running task; None outside of tasks."""
    return CURRENT_REQUEST.get()


def unsigned_run() -> Request | None:
    """A running task whose message was unsigned: code outside of tasks may run in a thread that it
    started.
    """
    return next(iter(_UNSIGNED_RUNS.copy().values()), None) if _UNSIGNED_RUNS else None


class RequestScope:
    """The block in which `current_request()` returns this request.

    A class, because every task passes here and a generator costs about twice as much.
    """

    __slots__ = ("_request", "_token")

    def __init__(self, request: Request) -> None:
        self._request = request

    def __enter__(self) -> Request:
        self._token = CURRENT_REQUEST.set(self._request)
        if self._request.signs_for == UNSIGNED:
            _UNSIGNED_RUNS[id(self._request)] = self._request
        return self._request

    def __exit__(self, *_error: object) -> None:
        CURRENT_REQUEST.reset(self._token)
        if self._request.signs_for == UNSIGNED:
            _UNSIGNED_RUNS.pop(id(self._request), None)


def request_of(
    call: TaskCall,
    *,
    hostname: str,
    queue: str,
    redelivered: bool = False,
    is_eager: bool = False,
    signs_for: str | None = None,
) -> Request:
    """The request of a decoded call."""
    headers = call.headers
    return Request(
        id=headers.id,
        task=headers.task,
        args=call.args,
        kwargs=call.kwargs,
        retries=headers.retries,
        root_id=headers.root_id or headers.id,
        parent_id=headers.parent_id,
        group=headers.group,
        group_index=headers.group_index,
        eta=headers.eta,
        expires=headers.expires,
        timelimit=headers.timelimit,
        hostname=hostname,
        delivery_info={"routing_key": queue, "priority": call.priority, "redelivered": redelivered},
        reply_to=call.reply_to,
        headers=call.extra,
        called_directly=False,
        is_eager=is_eager,
        call=call,
        signs_for=signs_for,
    )


def stores_result(headers: TaskHeaders, own: TaskOptions | None, settings: Settings) -> bool:
    """Whether a result is stored: as the message states, else the task's option, else the app's setting."""
    ignored = headers.ignore_result
    if ignored is None and own is not None:
        ignored = own.ignore_result
    return not (settings.task_ignore_result if ignored is None else ignored)
