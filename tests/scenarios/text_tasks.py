"""Tasks whose texts are no Unicode, or not fit to be shown."""

import logging
import os
from typing import Any

from umbel import App, Reject

app = App("text")
NO_UNICODE = os.fsdecode(b"caf\xff")
log = logging.getLogger("text")


class Unshowable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


class Treacherous(dict[str, Any]):
    def items(self) -> Any:
        raise RuntimeError("no items")


class SaysNoUnicode(Exception):
    def __repr__(self) -> str:
        return NO_UNICODE


@app.task
def pid() -> int:
    return os.getpid()


@app.task
def fail(how: str) -> None:
    match how:
        case "no unicode":
            raise ValueError(f"no such file: {NO_UNICODE}")
        case "says no unicode":
            raise SaysNoUnicode(NO_UNICODE)
        case "cannot be shown":
            raise Unshowable(5)
        case "raises when looked at":
            raise ValueError(Treacherous(a=1), Unshowable())
        case "odd syntax error":
            error = SyntaxError("odd")
            error.text, error.lineno, error.filename = 5, "x", 7  # type: ignore[assignment]
            raise error
        case "module of no unicode":
            raise type("Strange", (Exception,), {"__module__": NO_UNICODE})("here")
        case "rejected":
            raise Reject(NO_UNICODE)


@app.task
def give_back() -> str:
    return NO_UNICODE


@app.task
def say() -> str:
    print(NO_UNICODE, "\x1b[2J")
    log.warning("found %s", NO_UNICODE, extra={"file": f"{NO_UNICODE}\nFORGED LINE"})
    return "said"
