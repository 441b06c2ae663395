"""`celeryd_init` is sent wherever a Celery project is loaded for children, and once in a process."""

import subprocess
from pathlib import Path

from tests.celery_apps.programs import PYTHON, ROOT

PROGRAM = """
import json
from celery import Celery, signals
from umbel.celery.host import CeleryHost

app, told = Celery("project", broker="memory://"), []

@signals.celeryd_init.connect
def change(sender, conf, **_):
    told.append(sender)
    conf.task_default_rate_limit = "7/s"

for _ in range(2):  # the second time as in a copy of a process that has loaded it
    CeleryHost(app).before_children("w1@box", forks=True)
print(json.dumps([told, app.conf.task_default_rate_limit]))
"""


def test_children_see_the_conf_that_celeryd_init_has_changed(tmp_path: Path) -> None:
    ran = subprocess.run(
        [str(PYTHON), "-c", PROGRAM],
        env={"PYTHONPATH": str(ROOT / "src"), "PATH": "/usr/bin:/bin"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.stdout == '[["w1@box"], "7/s"]\n', ran.stderr
