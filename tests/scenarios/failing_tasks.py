"""A task that fails until it is mended. Each run leaves a line in a journal."""

import os
from pathlib import Path
from typing import Any

from umbel import App, Task

app = App("failing")
SECRET = "correct horse battery"


def journal_of(directory: str) -> Path:
    return Path(directory) / "journal.txt"


@app.task(bind=True, sensitive=("secret",))
def pays(self: Task[..., Any], directory: str, number: int, secret: str) -> int:
    request = self.request
    words = (
        request.id,
        (request.headers or {}).get("retry_of", "-"),
        str(request.root_id),
        str(int(request.delivery_info["redelivered"])),
        "right" if secret == SECRET else "wrong",
    )
    descriptor = os.open(journal_of(directory), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(descriptor, " ".join(words).encode() + b"\n")
    os.close(descriptor)
    if not (Path(directory) / "mended").exists():
        raise ValueError(f"no money for {number} with {secret}")
    return number


@app.task(acks_late=False)
def early(number: int) -> None:
    raise ValueError(f"early {number}")


@app.task(keep_failed=False)
def forgotten() -> None:
    raise ValueError("nobody retries this")


@app.task
def large(text: str) -> None:
    raise ValueError(len(text))
