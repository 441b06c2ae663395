"""Commands as a user gives them: in this process, where Python has started already, or in another one."""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import BytesIO, TextIOWrapper
from pathlib import Path

from umbel.cli.main import main

LIMIT_S = 60.0


def run_beside(
    command: Sequence[str], home: Path, environment: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=home,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def run_here(
    arguments: Sequence[str], home: Path, environment: Mapping[str, str], app_module: str
) -> subprocess.CompletedProcess[str]:
    """The command loads an app of its own from the module, as it would in a new process."""
    out, err = _stream(), _stream()
    command = ["umbel", *arguments]
    with (
        Path(os.devnull).open() as nothing,
        _process_state(home, environment),
        _module_loaded_anew(app_module),
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        sys.argv, sys.stdin = command, nothing
        try:
            main()
            code: object = 0
        except SystemExit as ended:
            code = ended.code
    assert isinstance(code, int)
    return subprocess.CompletedProcess(command, code, _text(out), _text(err))


@contextmanager
def _process_state(home: Path, environment: Mapping[str, str]) -> Iterator[None]:
    """What a process has once, put back afterwards."""
    variables, directory, path = dict(os.environ), Path.cwd(), list(sys.path)
    arguments, given = sys.argv, sys.stdin
    os.environ.update(environment)
    os.chdir(home)
    try:
        yield
    finally:
        os.chdir(directory)
        os.environ.clear()
        os.environ.update(variables)
        sys.path[:], sys.argv, sys.stdin = path, arguments, given


@contextmanager
def _module_loaded_anew(name: str) -> Iterator[None]:
    before = sys.modules.pop(name, None)
    try:
        yield
    finally:
        loaded = sys.modules.pop(name, None)
        if loaded is not None:
            loaded.app.close()
        if before is not None:
            sys.modules[name] = before


def _stream() -> TextIOWrapper:
    return TextIOWrapper(BytesIO(), encoding="utf-8", write_through=True)


def _text(stream: TextIOWrapper) -> str:
    stream.seek(0)
    return stream.read()
