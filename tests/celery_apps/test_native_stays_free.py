"""A native app's worker loads nothing of Celery, also where Celery is installed (A1, must not cost)."""

import subprocess
from pathlib import Path

from tests.celery_apps.programs import PYTHON, ROOT

APP = """
import sys
from umbel import App

app = App("plain", broker="sqlite:///plain.db")

@app.task
def loaded():
    names = ("celery", "kombu", "billiard", "vine", "amqp")
    return sorted(name for name in sys.modules if name.partition(".")[0] in names)
"""

LOOK = """
import asyncio
import sys
from pathlib import Path

from umbel.app.settings import override
from umbel.cli.run import worker
from umbel.launch.loading import find_app
from umbel.launch.workers import make_worker

async def main():
    found = find_app("plain")
    assert found.project is None
    settings = override(found.app.settings, worker_concurrency=1)
    running = make_worker(found, settings, node="w@here", run_directory=Path("run"))
    working = asyncio.create_task(running.run())
    in_child = await asyncio.to_thread(found.app.tasks["plain.loaded"].delay().get, timeout=60)
    working.cancel()
    await asyncio.wait([working])
    return in_child

assert worker
in_child = asyncio.run(main())
names = ("celery", "kombu", "billiard", "vine", "amqp")
here = sorted(name for name in sys.modules if name.partition(".")[0] in names)
print("main", here, "child", in_child)
"""


def test_a_native_worker_loads_nothing_of_celery(tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text(APP)
    (tmp_path / "look.py").write_text(LOOK)
    look = subprocess.run(
        [str(PYTHON), "look.py"],
        env={"PYTHONPATH": str(ROOT / "src"), "PATH": "/usr/bin:/bin"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert look.returncode == 0, look.stderr
    assert look.stdout == "main [] child []\n", look.stderr
