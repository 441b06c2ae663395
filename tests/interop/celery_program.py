"""The real `celery` command line, run as often as asked in one process: it takes seconds to start.

Each line of input is a list of words, as they would be typed after `celery -A shared_tasks`; each line
of output says what the program printed and with which status it would have ended.
"""

import io
import json
import sys
from contextlib import redirect_stderr, redirect_stdout
from typing import Any

from celery.bin.celery import celery  # run by Celery's Python


def run(words: list[str]) -> dict[str, Any]:
    out, err, status = io.StringIO(), io.StringIO(), 0
    with redirect_stdout(out), redirect_stderr(err):
        try:
            celery.main(args=["-A", "shared_tasks", *words], prog_name="celery", auto_envvar_prefix="CELERY")
        except SystemExit as ended:
            status = ended.code if isinstance(ended.code, int) else 1
    return {"status": status, "out": out.getvalue(), "err": err.getvalue()}


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line))), flush=True)
