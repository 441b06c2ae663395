"""Control commands of a Celery project: functions registered with Celery's `Panel`, as commands of ours.

They are called as Celery's worker calls them: with a state that has `app`, `hostname` and `tset`, and with
keyword arguments. What hangs on Celery's consumer is not there, and says so.
"""

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

from celery.worker import control as celerys

from umbel.celery.revoking import revoking_panel
from umbel.control.panel import Command, Panel, UsersPanel
from umbel.control.state import ControlState
from umbel.errors import NotSupported

# Celery's own answers where they show what belongs to Celery: its settings by their names.
_CELERYS = ("conf", "report")
_TYPES = (int, float, bool, str, list)


def celery_panel() -> Panel:
    """What such a worker obeys beside our commands: the project's, and Celery's `conf` and `report`."""
    panel, users = revoking_panel(), UsersPanel()
    for command in (*map(_command, _CELERYS), *users_commands()):
        users.add(command)
    panel.include(users)
    return panel


def users_commands() -> Iterator[Command]:
    for name in celerys.Panel.meta:
        if celerys.Panel.data[name].__module__ != celerys.__name__:
            yield _command(name)


class CeleryState:
    """The `state` of a handler: Celery's names, and behind them all that our commands see."""

    def __init__(self, state: ControlState) -> None:
        self._state = state
        self.app = state.app
        self.hostname = state.node
        self.tset = set

    @property
    def consumer(self) -> Any:
        raise NotSupported(
            "state.consumer is Celery's consumer, which a worker of Umbel's does not have; "
            "use state.app, state.hostname, or what umbel.control.state.ControlState offers"
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._state, name)


def _command(name: str) -> Command:
    handler, meta = celerys.Panel.data[name], celerys.Panel.meta[name]
    return Command(
        name,
        _with_state(handler),
        changes=meta.type != "inspect",
        arguments=tuple((str(one), _type(kind)) for one, kind in meta.args or ()),
        variadic=meta.variadic or "",
        aliases=(meta.alias,) if meta.alias else (),
        usage=meta.signature or "",
        help=meta.help or "",
        is_hidden=not meta.visible,
    )


def _with_state(handler: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(handler)
    def call(state: ControlState, **arguments: Any) -> Any:
        return handler(CeleryState(state), **arguments)

    return call


def _type(kind: Any) -> type:
    """Celery takes any function that makes a value of a text; ours are types."""
    if kind is celerys.strtobool:
        return bool
    return kind if kind in _TYPES else str
