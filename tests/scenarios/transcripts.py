"""Transcripts: scenarios in plain words, with what happens written below each step.

A transcript is a text file: some prose, a line that names the simulation, and steps. `play` performs the
steps in virtual time and writes what happened under each, so that the whole file can be compared or recorded.

    simulation: workers w1 w2
    at 0.0: client sends t1: add 1 2
        0.00  1 message waits
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TypeVar

SIMULATION = "simulation: "
STEP = re.compile(r"at (\d+(?:\.\d+)?): (.+)")
INDENT = "    "


@dataclass
class Step:
    at_s: float
    text: str
    happened: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return "\n".join([f"at {self.at_s:.1f}: {self.text}", *(INDENT + line for line in self.happened)])


@dataclass
class Transcript:
    """`lines` holds the steps and, as they are, the lines between them."""

    prose: str
    simulation: str
    lines: list[Step | str]

    @property
    def steps(self) -> list[Step]:
        return [line for line in self.lines if isinstance(line, Step)]

    def __str__(self) -> str:
        return "\n".join([self.prose + SIMULATION + self.simulation, *map(str, self.lines)]) + "\n"


def parse(text: str) -> Transcript:
    """Read everything but what happened, which is found out again."""
    prose, found, rest = text.partition(SIMULATION)
    if not found:
        raise ValueError(f"a transcript has a line that begins with {SIMULATION!r}")
    simulation, *lines = rest.splitlines()
    return Transcript(prose, simulation, [_line(line) for line in lines if not line.startswith(INDENT)])


def _line(line: str) -> Step | str:
    if step := STEP.fullmatch(line):
        return Step(float(step[1]), step[2])
    if line and not line.startswith("#"):
        raise ValueError(f"{line!r} is neither a step ('at 1.0: ...'), nor empty, nor a comment ('# ...')")
    return line


FunctionT = TypeVar("FunctionT", bound=Callable[..., None])


def phrase(pattern: str) -> Callable[[FunctionT], FunctionT]:
    """A step that a simulation understands; the groups of the pattern become arguments."""

    def mark(function: FunctionT) -> FunctionT:
        vars(function)["phrase"] = re.compile(pattern)
        return function

    return mark


class Simulation(AbstractContextManager["Simulation"], ABC):
    """Performs steps in virtual time and says what happened."""

    def __init__(self) -> None:
        self._said: list[str] = []

    @property
    @abstractmethod
    def now(self) -> float: ...

    @abstractmethod
    def run(self, until: float) -> None:
        """Let happen what happens before the next step."""

    def say(self, text: str) -> None:
        self._said.append(f"{self.now:.2f}  {text}")

    def take_said(self) -> list[str]:
        said, self._said = self._said, []
        return said

    def perform(self, text: str) -> None:
        for pattern, function in self._phrases():
            if found := pattern.fullmatch(text):
                function(self, *found.groups())
                return
        known = ", ".join(repr(pattern.pattern) for pattern, _ in self._phrases())
        raise ValueError(f"nobody understands {text!r}; steps are: {known}")

    @classmethod
    def _phrases(cls) -> Iterator[tuple[re.Pattern[str], Callable[..., None]]]:
        for function in vars(cls).values():
            if hasattr(function, "phrase"):
                yield function.phrase, function

    def __exit__(self, *_: object) -> None:
        """Nothing to close."""


Make = Callable[[Sequence[str], Sequence[Step]], Simulation]


def play(transcript: Transcript, simulations: dict[str, Make]) -> Transcript:
    """Perform the steps and write under each what happened until the next one."""
    name, *arguments = transcript.simulation.split()
    with simulations[name](arguments, transcript.steps) as simulation:
        before: Step | None = None
        for step in transcript.steps:
            simulation.run(until=step.at_s)
            if before is not None:
                before.happened = simulation.take_said()
            simulation.perform(step.text)
            before = step
        if before is not None:
            before.happened = simulation.take_said()
    return transcript
