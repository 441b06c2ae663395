"""Project: what a worker asks of the app it runs, whichever library that app was written with."""

from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

from umbel.app.configuration.settings import Settings
from umbel.backends.interface import Backend
from umbel.brokers.interface import BrokerSettings
from umbel.control.panel import Panel
from umbel.protocol.delivery.delivery import TaskRules
from umbel.worker.settings import EndWithoutRunning
from umbel.worker.user_code.hooks import LifeHooks


class Project(Protocol):
    def begin(self, settings: Settings, node: str) -> Settings:
        """Before anything else is asked: load the app, refuse what a worker cannot honour, log the rest.

        Gives the settings with which the worker runs.
        """
        ...

    def logging(
        self, level: str, logfile: str | None, node: str, *, as_json: bool
    ) -> AbstractContextManager[None]:
        """Log the way the app wants, in the main process, until the worker has ended."""
        ...

    def task_rules(self, settings: Settings) -> dict[str, TaskRules]:
        """What the worker's main process must know of each task; `settings` have the flags on top."""
        ...

    def task_names(self) -> Collection[str]: ...
    def queue_of(self, task: str) -> str:
        """Where calls of the task go that name no queue."""
        ...

    def for_broker(self, settings: Settings) -> BrokerSettings: ...
    def open_backend(self, settings: Settings) -> Backend: ...
    def end_without_running(self) -> EndWithoutRunning: ...
    def life_hooks(self, node: str, timeout_s: float) -> LifeHooks: ...
    def control_commands(self) -> Panel: ...
    def written_by_users(self, node: str) -> Mapping[str, Any]:
        """Their control commands, election handlers, periodic tasks, steps and hooks of nodes."""
        ...
