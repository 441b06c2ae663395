"""`umbel events --json` as a process of its own, with nothing but the broker's address."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.waiting import wait_until
from umbel.cli.watch import LISTENING


class EventsTail:
    def __init__(self, home: Path, broker: str, *arguments: str) -> None:
        self._file = home / "events.jsonl"
        self._errors = home / "events.err"
        command = [sys.executable, "-m", "umbel.cli.main", "events", "--json", "-b", broker]
        with self._file.open("wb") as out, self._errors.open("wb") as errors:
            self._process = subprocess.Popen(
                [*command, *arguments], cwd=home, stdin=subprocess.DEVNULL, stdout=out, stderr=errors
            )
        wait_until(self._listens, what="umbel events to listen")

    def _listens(self) -> bool:
        assert self._process.poll() is None, self._errors.read_text()
        return LISTENING in self._errors.read_text()

    def seen(self) -> list[dict[str, Any]]:
        lines = self._file.read_text().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def wait_for(self, what: str, **fields: Any) -> dict[str, Any]:
        def found() -> dict[str, Any] | None:
            return next((one for one in self.seen() if fields.items() <= one.items()), None)

        return wait_until(found, what=what)

    def ended(self) -> int:
        """Wait until it ends by itself."""
        return self._process.wait(30)

    def stop(self) -> int:
        self._process.send_signal(signal.SIGINT)
        return self._process.wait(20)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._process.poll() is None:
            self.stop()
