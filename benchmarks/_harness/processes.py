"""Processes that a benchmark starts: each is ended by its own id, whatever happens.

A started process gets a session of its own, so that Ctrl-C reaches the benchmark alone, which
then ends what it started in order. Whoever is left of its descendants is killed one by one: their
ids are noted, with their start times, before the first signal is sent.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

STOP_S = 20.0
WAIT_S = 120.0
LOOK_EVERY_S = 0.005
KILL_S = 5.0
LOG_TAIL_CHARACTERS = 2000
CPU_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


class BenchmarkFailed(Exception):
    """A contender did not do what was asked of it; there is nothing to compare."""


@dataclass(frozen=True, slots=True)
class Running:
    name: str
    process: subprocess.Popen[bytes]
    log: Path

    def check(self) -> None:
        """Raise if the process has ended before it was told to."""
        status = self.process.poll()
        if status is not None:
            raise BenchmarkFailed(f"{self.name} ended by itself with status {status}\n{_tail(self.log)}")

    def failed(self, what: str) -> BenchmarkFailed:
        return BenchmarkFailed(f"{self.name} {what}\n{_tail(self.log)}")

    def cpu_s(self) -> float:
        """What the process and its living descendants have used so far."""
        return family_cpu_s(self.process.pid)

    def pss_bytes(self) -> int:
        """The memory of the process and its descendants; shared pages are counted once."""
        return sum(_pss_bytes(one) for one in _family(self.process.pid))


def family_cpu_s(pid: int) -> float:
    """What a process and its living descendants have used so far."""
    return sum(_cpu_s(one) for one in _family(pid))


@contextmanager
def running(
    name: str,
    arguments: Sequence[str | Path],
    *,
    environment: Mapping[str, str],
    directory: Path,
    stop_signal: signal.Signals = signal.SIGTERM,
    stop_family: bool = False,
) -> Iterator[Running]:
    """A process for as long as the block lasts.

    With `stop_family` its descendants get the signal as well, like from a terminal's Ctrl-C.
    """
    log = directory / f"{name}.log"
    with log.open("ab") as output:
        process = subprocess.Popen(
            arguments,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment,
            cwd=directory,
            start_new_session=True,
        )
    try:
        yield Running(name, process, log)
    finally:
        _end(name, process, stop_signal, family=stop_family)


def answer_of(
    name: str,
    arguments: Sequence[str | Path],
    *,
    environment: Mapping[str, str],
    directory: Path,
    timeout_s: float,
) -> Any:
    """What a process prints, as JSON, that ends by itself."""
    process = subprocess.Popen(
        arguments,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        cwd=directory,
        start_new_session=True,
        text=True,
    )
    try:
        output, errors = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise BenchmarkFailed(f"{name} did not end within {timeout_s:g} s") from None
    finally:
        _end(name, process, signal.SIGTERM)
    if process.returncode != 0:
        raise BenchmarkFailed(
            f"{name} ended with status {process.returncode}\n{errors[-LOG_TAIL_CHARACTERS:]}"
        )
    return json.loads(output)


def wait_for(condition: Callable[[], bool], what: str, worker: Running | None = None) -> None:
    """Look until it holds; a worker that ends meanwhile, or takes too long, has failed."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        if worker is not None:
            worker.check()
        if time.monotonic() > deadline:
            text = f"did not {what} within {WAIT_S:g} s"
            raise worker.failed(text) if worker else BenchmarkFailed(text)
        time.sleep(LOOK_EVERY_S)


@contextmanager
def ended_in_order() -> Iterator[None]:
    """Let SIGTERM unwind the benchmark like Ctrl-C does, so that every block above is left."""

    def leave(number: int, _frame: FrameType | None) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _end(
    name: str,
    process: subprocess.Popen[bytes] | subprocess.Popen[str],
    stop_signal: signal.Signals,
    *,
    family: bool = False,
) -> None:
    descendants = _family(process.pid)[1:]
    if process.poll() is None:
        process.send_signal(stop_signal)
        for one in descendants if family else ():
            with suppress(psutil.NoSuchProcess):
                one.send_signal(stop_signal)
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)
    if process.poll() is None:
        print(f"{name} did not end within {STOP_S:g} s of {stop_signal.name}: killed", file=sys.stderr)
        process.kill()
        process.wait(KILL_S)
    _gone, left = psutil.wait_procs(descendants, timeout=1.0)
    for one in left:
        print(f"{name} left process {one.pid} behind: killed", file=sys.stderr)
        with suppress(psutil.NoSuchProcess):
            one.kill()


def _family(pid: int) -> list[psutil.Process]:
    try:
        parent = psutil.Process(pid)
        return [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _cpu_s(process: psutil.Process) -> float:
    try:
        used = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return used.user + used.system


def _pss_bytes(process: psutil.Process) -> int:
    try:
        return int(process.memory_full_info().pss)
    except psutil.NoSuchProcess:
        return 0


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-LOG_TAIL_CHARACTERS:] if log.exists() else ""
