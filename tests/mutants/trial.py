"""Trial: run the guards of a subject on one mutant, in a copy of the source.

The working tree is never touched. A copy is read by way of PYTHONPATH, before the installed package.
Before the first mutant of a subject its guards must pass on the source as it is, and fail on a module
that cannot be loaded: guards that do not see the copy would let everything survive.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from enum import Enum
from pathlib import Path
from types import MappingProxyType

from tests.mutants import forked, killers
from tests.mutants.mutations import Mutant, lua_mutants, python_mutants, within
from tests.mutants.subjects import Subject

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGE = Path("src") / "umbel"
LIMIT_MIN_S = 30.0
LIMIT_MAX_S = 600.0
LIMIT_FACTOR = 4.0  # of what the guards take on good code
TEARDOWN_S = 20.0


class Fate(Enum):
    KILLED = "killed"
    TIMED_OUT = "timed out"
    SURVIVED = "survived"


_FATES = {"0": Fate.SURVIVED, "1": Fate.KILLED, "None": Fate.TIMED_OUT}  # by what a fork ended with


class CannotJudge(Exception):
    """The guards say nothing about the subject."""


def mutants_of(subject: Subject) -> list[Mutant]:
    text = (ROOT / PACKAGE / subject.path).read_text()
    made = lua_mutants(text) if subject.path.endswith(".lua") else python_mutants(text)
    return within(text, subject.sections, made) if subject.sections else made


class Trial:
    def __init__(self, home: Path) -> None:
        self._home = home
        self._written = 0
        self.limit_s = LIMIT_MAX_S
        shutil.copytree(ROOT / "src", home / "src", ignore=shutil.ignore_patterns("__pycache__"))

    def prepare(self, subject: Subject) -> None:
        self.limit_s = self._limit_now_s(subject)
        broken = "error('broken')" if subject.path.endswith(".lua") else "raise ImportError('broken')"
        whole = Mutant("broken", 1, "", broken, f"{broken}\n")
        if self.run(subject, whole) is Fate.SURVIVED:
            raise CannotJudge(f"the guards of {subject.path} pass although it cannot be loaded")

    def _limit_now_s(self, subject: Subject) -> float:
        """So many times what the guards take on the source as it is."""
        began = time.monotonic()
        if self._run(subject, LIMIT_MAX_S) is not Fate.SURVIVED:
            raise CannotJudge(f"the guards of {subject.path} fail on the source as it is: {self._output}")
        return max(LIMIT_MIN_S, LIMIT_FACTOR * (time.monotonic() - began))

    def take_over(self, other: "Trial") -> None:
        self.limit_s = other.limit_s

    def run(self, subject: Subject, mutant: Mutant) -> Fate:
        while (fate := self._try(subject, mutant)) is Fate.TIMED_OUT:
            # On a busy machine good code is late as well; then being late says nothing.
            needed_s = self._limit_now_s(subject)
            if needed_s <= self.limit_s:
                break
            self.limit_s = needed_s
        return fate

    def run_scripts(self, subject: Subject, mutants: Sequence[Mutant]) -> list[Fate]:
        """The same for several mutants of a script, quicker: one pytest tries them all, in forks."""
        directory = Path(tempfile.mkdtemp(dir=self._home))
        for place, mutant in enumerate(mutants):
            (directory / str(place)).write_text(mutant.text)
        variables = {
            forked.DIRECTORY: str(directory),
            forked.SCRIPT: str(self._home / PACKAGE / subject.path),
            forked.LIMIT_S: str(self.limit_s),
        }
        plugin = ("-p", forked.__name__)
        if self._run(subject, (len(mutants) + 1) * self.limit_s, plugin, variables) is Fate.KILLED:
            raise CannotJudge(f"the guards of {subject.path} cannot be run: {self._output}")
        said = [directory / f"{place}.status" for place in range(len(mutants))]
        fates = [_FATES[file.read_text() if file.exists() else "None"] for file in said]
        return [
            self.run(subject, mutant) if fate is Fate.TIMED_OUT else fate
            for mutant, fate in zip(mutants, fates, strict=True)
        ]

    def _try(self, subject: Subject, mutant: Mutant) -> Fate:
        file = self._home / PACKAGE / subject.path
        original = (ROOT / PACKAGE / subject.path).read_bytes()
        try:
            self._write(file, mutant.text.encode())
            return self._run(subject, self.limit_s)
        finally:
            self._write(file, original)

    def _write(self, file: Path, source: bytes) -> None:
        file.write_bytes(source)
        # Two mutants of one second and one size would look alike to the import system.
        self._written += 1
        os.utime(file, (self._written, self._written))

    def _run(
        self,
        subject: Subject,
        limit_s: float,
        more: Sequence[str] = (),
        variables: Mapping[str, str] = MappingProxyType({}),
    ) -> Fate:
        guards = [str(ROOT / "tests" / guard) for guard in subject.guards]
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-x",
            "-q",
            "-p",
            "no:cacheprovider",
            "-p",
            killers.__name__,
            *more,
            "--hypothesis-seed=1",
            "--hypothesis-profile=mutants",
        ]
        with (self._home / "output.txt").open("w+b") as output:
            process = subprocess.Popen(
                [*command, *guards],
                cwd=ROOT,
                env={**self._environment(subject), **variables},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
            try:
                status = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                return Fate.TIMED_OUT
            finally:
                _end(process)
        return Fate.SURVIVED if status == 0 else Fate.KILLED

    @property
    def _output(self) -> str:
        return (self._home / "output.txt").read_text(errors="replace")[-3000:]

    def _environment(self, subject: Subject) -> dict[str, str]:
        # One file for all trials, which stand side by side.
        known = self._home.parent / f"{subject.path.replace('/', '.')}.killers"
        known.touch()
        kept = {
            name: value for name, value in os.environ.items() if not name.startswith(("UMBEL_", "PYTHON"))
        }
        return kept | {
            "PYTHONPATH": str(self._home / "src"),
            "HYPOTHESIS_STORAGE_DIRECTORY": str(self._home / "hypothesis"),
            killers.VARIABLE: str(known),
        }


def _end(process: subprocess.Popen[bytes]) -> None:
    """First as Ctrl-C does, so that tests stop the servers they started; then whatever is left."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(TEARDOWN_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
