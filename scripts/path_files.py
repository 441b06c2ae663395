"""Which files of Umbel one `delay()` and its run pass through: in the client, the worker and its child.

    python -m scripts.path_files [BROKER_URL]      by default an embedded one in a temporary directory

A worker with one child process runs a few tasks while function calls are recorded. A file counts when
every round passes through it, so heartbeats and lease renewals do not.
"""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import FrameType

import umbel
from umbel import App

HOME = str(Path(umbel.__file__).parent) + "/"
ROUNDS = 5
RUN_S = 60.0
SEEN = Path(os.environ.get("PATH_FILES_SEEN", "seen.txt"))

app = App("path_files")
_seen: set[str] = set()


def note(frame: FrameType, event: str, _argument: object) -> None:
    if event == "call" and frame.f_code.co_filename.startswith(HOME):
        _seen.add(frame.f_code.co_filename.removeprefix(HOME))


def begin_or_end(*_: object) -> None:
    """In the main process of the worker, at a signal: look, or write down what was seen."""
    if sys.getprofile() is None:
        _seen.clear()
        sys.setprofile(note)
        return
    sys.setprofile(None)
    draft = SEEN.with_suffix(".draft")
    draft.write_text("\n".join(sorted(_seen)))
    draft.replace(SEEN)


@app.task(name="add")
def add(x: int, y: int) -> int:
    return x + y


@app.task(name="look")
def look() -> None:
    _seen.clear()
    sys.setprofile(note)


@app.task(name="tell")
def tell() -> list[str]:
    sys.setprofile(None)
    return sorted(_seen)


if "PATH_FILES_SEEN" in os.environ:
    signal.signal(signal.SIGUSR2, begin_or_end)


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="umbel-path-") as directory:
        worker = start_worker(Path(directory), sys.argv[1:])
        try:
            warm_up()
            report(worker, Path(directory) / "seen.txt")
        finally:
            worker.terminate()
            worker.wait(RUN_S)


def start_worker(directory: Path, urls: list[str]) -> subprocess.Popen[bytes]:
    os.environ["UMBEL_BROKER"] = urls[0] if urls else f"sqlite:///{directory}/umbel.db"
    app.settings = App("path_files").settings
    environment = os.environ | {"PATH_FILES_SEEN": str(directory / "seen.txt")}
    command = [
        sys.executable,
        "-m",
        "umbel.cli.main",
        "worker",
        "-A",
        f"{__file__}:app",
        "-c",
        "1",
        "-l",
        "error",
    ]
    return subprocess.Popen(command, env=environment, cwd=directory)


def warm_up() -> None:
    """Until everything is loaded and known."""
    for _ in range(20):
        add.delay(1, 2).get(timeout=RUN_S)


def report(worker: subprocess.Popen[bytes], seen: Path) -> None:
    rounds = [(in_client(), in_worker(worker, seen), in_child()) for _ in range(ROUNDS)]
    for place, found in zip(("client", "main process", "child"), zip(*rounds, strict=True), strict=True):
        always = set.intersection(*found)
        print(f"{place}: {len(always)} files")
        for name in sorted(always):
            print(f"    {name}")


def in_client() -> set[str]:
    _seen.clear()
    sys.setprofile(note)
    result = add.delay(1, 2)
    sys.setprofile(None)
    result.get(timeout=RUN_S)
    return set(_seen)


def in_worker(worker: subprocess.Popen[bytes], seen: Path) -> set[str]:
    seen.unlink(missing_ok=True)
    worker.send_signal(signal.SIGUSR2)
    add.delay(1, 2).get(timeout=RUN_S)
    worker.send_signal(signal.SIGUSR2)
    while not seen.exists():
        add.delay(1, 2).get(timeout=RUN_S)  # the signal is handled when the loop turns
    return set(seen.read_text().split())


def in_child() -> set[str]:
    look.delay().get(timeout=RUN_S)
    add.delay(1, 2).get(timeout=RUN_S)
    found: list[str] = tell.delay().get(timeout=RUN_S)
    return set(found)


if __name__ == "__main__":
    main()
