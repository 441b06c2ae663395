"""CeleryClient: a client of the real Celery in a process of its own, which runs the lines it is sent.

The names it knows: celery, kombu, Celery, Queue, Exchange, binding, Connection. What a line assigns is
there for the next ones; the value of a last line that is an expression is the answer. Run as a
program, with Celery's Python, this file is that process.
"""

import ast
import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

PYTHON = Path(__file__).parent.parent.parent / ".venv-celery" / "bin" / "python"
ANSWER_S = 60.0


class CeleryClient:
    def __init__(self, log: Path) -> None:
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                [PYTHON, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
            )

    def __call__(self, lines: str, **names: Any) -> Any:
        __tracebackhide__ = True
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps({"lines": lines, "names": names}), file=self._process.stdin, flush=True)
        watchdog = threading.Timer(ANSWER_S, self._process.kill)
        watchdog.start()
        try:
            said = self._process.stdout.readline()
        finally:
            watchdog.cancel()
        assert said, "the client ended; its log says why"
        answer = json.loads(said)
        assert "raised" not in answer, answer["raised"]
        return answer["value"]

    def close(self) -> None:
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
        self._process.wait(ANSWER_S)


def main() -> None:
    import celery  # type: ignore[import-not-found, unused-ignore]
    import kombu  # type: ignore[import-not-found, unused-ignore]

    known: dict[str, Any] = {"celery": celery, "kombu": kombu, "Celery": celery.Celery}
    known |= {name: getattr(kombu, name) for name in ("Queue", "Exchange", "binding", "Connection")}
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            answer = {"value": run(asked["lines"], known | asked["names"], known)}
        except Exception as error:
            answer = {"raised": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer, default=str), flush=True)


def run(lines: str, names: dict[str, Any], known: dict[str, Any]) -> Any:
    parsed = ast.parse(lines)
    last = parsed.body.pop() if isinstance(parsed.body[-1], ast.Expr) else None
    exec(compile(parsed, "<asked>", "exec"), names)
    known |= names
    if not isinstance(last, ast.Expr):
        return None
    return eval(compile(ast.Expression(last.value), "<asked>", "eval"), names)


if __name__ == "__main__":
    main()
