"""Routing: which queue a task goes to, when neither the call nor the task says so.

`task_routes` maps task names or shell patterns to a queue name or to options:

    task_routes = {"billing.*": "billing", "reports.nightly": {"queue": "slow", "priority": 9}}

The first pattern that matches wins, in the order written. A call's own option beats the task's
option, which beats the route, which beats the default.
"""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from umbel.app.options import checked_priority
from umbel.errors import BadSetting

ROUTE_OPTIONS = frozenset({"queue", "priority"})
NAMES_MAX = 10_000  # task names whose route is remembered; past this they are looked up again
_NO_ROUTE: Mapping[str, Any] = {}


class Router:
    def __init__(self, routes: Mapping[str, str | Mapping[str, Any]]) -> None:
        self._routes = [(pattern, _options(pattern, route)) for pattern, route in routes.items()]
        self._found: dict[str, Mapping[str, Any]] = {}

    def route(self, task: str) -> Mapping[str, Any]:
        if not self._routes:
            return _NO_ROUTE
        found = self._found.get(task)
        if found is None:
            if len(self._found) >= NAMES_MAX:
                self._found.clear()
            found = self._found[task] = self._first_match(task)
        return found

    def _first_match(self, task: str) -> Mapping[str, Any]:
        return next((options for pattern, options in self._routes if fnmatchcase(task, pattern)), _NO_ROUTE)


def _options(pattern: str, route: str | Mapping[str, Any]) -> Mapping[str, Any]:
    options = {"queue": route} if isinstance(route, str) else dict(route)
    problem = _problem(options)
    if problem:
        raise BadSetting("task_routes", {pattern: route}, problem, source="the app's settings")
    return options


def _problem(options: Mapping[str, Any]) -> str:
    unknown = sorted(set(options) - ROUTE_OPTIONS)
    if unknown:
        return f"unknown options {unknown}; a route takes {sorted(ROUTE_OPTIONS)}"
    if not isinstance(options.get("queue", ""), str):
        return f"queue {options['queue']!r} must be text"
    try:
        checked_priority(options.get("priority"))
    except ValueError as error:
        return str(error)
    return ""
