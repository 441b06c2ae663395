"""Signals and bootsteps: users' code that runs at moments in the life of tasks and workers.

    @app.signals.worker_process_init.connect
    def connect_to_database(**context): ...

Each receiver of a signal gets the keyword arguments listed with its signal, and should accept `**context`,
because later versions may add to them. A receiver that raises is logged and the others still run.

    @app.steps.add
    class Cache:
        name = "cache"
        requires = ("connection",)

        def start(self, worker): ...
        def stop(self, worker): ...

A bootstep starts and stops with the worker; `worker` is what control commands get (`control/state.py`).
"""

import logging
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from umbel.control.panel import describe_step
from umbel.pools.guard import Raised, call_guarded

# ---- signals ---------------------------------------------------------------------------------------
#
# Moments in the life of tasks and workers that users' code can listen to.

log = logging.getLogger("umbel.signals")

ReceiverT = TypeVar("ReceiverT", bound=Callable[..., Any])


class Signal:
    """One signal with its receivers."""

    __slots__ = ("name", "receivers")

    def __init__(self, name: str) -> None:
        self.name = name
        self.receivers: list[Callable[..., Any]] = []

    def connect(self, receiver: ReceiverT) -> ReceiverT:
        """Call `receiver` from now on; usable as a decorator."""
        self.receivers.append(receiver)
        return receiver

    def disconnect(self, receiver: Callable[..., Any]) -> None:
        """Stop calling `receiver`; nothing happens when it was not connected."""
        self.receivers = [known for known in self.receivers if known is not receiver]

    def send(self, **context: Any) -> None:
        """Call all receivers with this context; a receiver that raises is logged."""
        for receiver in tuple(self.receivers):
            happened = call_guarded(receiver, **context)
            if isinstance(happened, Raised):
                log.error(
                    "signal receiver raised an exception",
                    extra={"signal": self.name, "receiver": repr(receiver)},
                    exc_info=happened.error,
                )


class Signals:
    """The signals of one app."""

    def __init__(self) -> None:
        # task, task_id, args, kwargs, queue, headers: receivers may add to the headers of the message
        self.before_task_publish = Signal("before_task_publish")
        self.before_chord_publish = Signal("before_chord_publish")  # group_id, parts: messages of the header
        self.after_task_publish = Signal("after_task_publish")  # task, task_id, queue
        self.task_prerun = Signal("task_prerun")  # task, task_id, args, kwargs
        self.task_postrun = Signal("task_postrun")  # task, task_id, args, kwargs, state, value
        self.task_success = Signal("task_success")  # task, task_id, result
        self.task_failure = Signal("task_failure")  # task, task_id, args, kwargs, error, traceback
        self.task_retry = Signal("task_retry")  # task, task_id, error, due
        self.worker_init = Signal("worker_init")  # node; in the main process, before it connects
        self.worker_ready = Signal("worker_ready")  # node; in the main process
        self.worker_shutdown = Signal("worker_shutdown")  # node; in the main process
        self.worker_process_init = Signal("worker_process_init")  # node, child; in each child
        self.worker_process_shutdown = Signal("worker_process_shutdown")  # node; in each child
        # About other nodes, in the main process: node, pid, incarnation, software, reason.
        self.on_node_join = Signal("on_node_join")
        self.on_node_leave = Signal("on_node_leave")  # it shut down gracefully
        self.on_node_lost = Signal("on_node_lost")  # it stopped sending heartbeats

    def of_nodes(self) -> dict[str, Callable[..., None]]:
        """What a worker calls when another node joins, leaves or is lost: those with receivers."""
        signals = (self.on_node_join, self.on_node_leave, self.on_node_lost)
        return {signal.name: signal.send for signal in signals if signal.receivers}


# ---- steps -----------------------------------------------------------------------------------------
#
# `app.steps`: users' bootsteps, which start and stop with the worker.

StepT = TypeVar("StepT", bound=type[Any])


class Steps:
    """The bootsteps of an app, in the order in which they were added."""

    def __init__(self) -> None:
        self._kinds: list[type[Any]] = []

    def add(self, kind: StepT) -> StepT:
        """Register a bootstep for workers of the app; usable as a decorator of the class."""
        describe_step(kind)
        self._kinds.append(kind)
        return kind

    def __iter__(self) -> Iterator[type[Any]]:
        return iter(tuple(self._kinds))
