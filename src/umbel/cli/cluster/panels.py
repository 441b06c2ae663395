"""Which remote commands there are: the built-in ones, and those of the app."""

from umbel.control.commands import builtin_panel
from umbel.control.panel import Panel
from umbel.errors import AppNotFound
from umbel.launch.loading import find_app


def known_commands(app_name: str | None) -> Panel:
    panel = builtin_panel()
    try:
        found = find_app(app_name)
        users = found.project.control_commands() if found.project else found.app.panel
        panel.include(users)
    except AppNotFound:
        if app_name is not None:
            raise
    return panel
