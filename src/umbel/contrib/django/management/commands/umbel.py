"""`manage.py umbel ...`: the `umbel` command for the project's app, with its options and exit codes."""

import os
import sys
from argparse import REMAINDER, ArgumentParser
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand

from umbel.contrib.django.connections import close_all

APP = "umbel.contrib.django:app"


class Command(BaseCommand):
    """Passes all arguments to the `umbel` command."""

    help = "Umbel: worker, dev, call and every other command, for the app of this project."
    requires_system_checks: Sequence[str] = ()

    def run_from_argv(self, argv: list[str]) -> None:
        """Pass on all arguments, including `--help`, except those with which manage.py finds the settings."""
        manage = ArgumentParser(add_help=False, allow_abbrev=False)
        manage.add_argument("--settings")
        manage.add_argument("--pythonpath")
        given, words = manage.parse_known_args(argv[2:])
        self._run(words, [Path(argv[0]).resolve().parent, *([given.pythonpath] if given.pythonpath else [])])

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Accept any arguments, for `call_command`."""
        parser.add_argument("words", nargs=REMAINDER)

    def handle(self, *_args: Any, words: Sequence[str], **_options: Any) -> None:
        """Run for `call_command`; raises SystemExit at the end."""
        self._run(words, [])

    def _run(self, words: Sequence[str], places: Sequence[str | Path]) -> None:
        from umbel.cli.main import main

        close_all()  # of the project's setup: a worker forks its children from this process
        _let_processes_find(places)
        before, sys.argv = sys.argv, ["umbel", "-A", APP, *words]
        try:
            main()
        finally:
            sys.argv = before


def _let_processes_find(places: Sequence[str | Path]) -> None:
    """Let the processes of a worker import the project from the same places as manage.py."""
    known = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    new = [str(place) for place in places if str(place) not in known]
    os.environ["PYTHONPATH"] = os.pathsep.join(entry for entry in (*new, *known) if entry)
