"""`umbel celery`: the commands about Celery projects."""

import click

from umbel.cli.lazy import Lazy, LazyGroup

COMMANDS = {
    "check": Lazy("celery.check", "List what a Celery project uses: works, differs, or is not supported."),
}


@click.group("celery", cls=LazyGroup, places=COMMANDS)
def command() -> None:
    """Check what a Celery project uses before Umbel runs its worker."""
