"""The built-in commands, one file for each family; reply shapes are Celery's (wire 5.3 to 5.5)."""

from umbel.control.commands import cluster, inspection, limits, pool, queues, tasks
from umbel.control.panel import Panel


def builtin_panel() -> Panel:
    panel = Panel()
    for family in (inspection, tasks, cluster, limits, queues, pool):
        panel.include(family.panel)
    return panel
