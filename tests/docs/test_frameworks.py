"""The projects that the pages for FastAPI, Flask and Django print: each file as printed, used as it says.

What belongs to the reader (models, a database) is written here. A block's first line names its file.
"""

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.docs.blocks import DOCS, Block, blocks_of
from tests.docs.terminal import Terminal


def run(home: Path, page: str, readers: Mapping[str, str], program: str) -> None:
    """Write the page's files after what the reader has in them already, and run the program there."""
    files = dict(readers)
    for block in blocks_of(DOCS / page):
        if found := re.match(r"# ([\w/]+\.py)\n", block.text):
            files[found[1]] = files.get(found[1], "") + block.text
    for name, code in files.items():
        (home / name).parent.mkdir(exist_ok=True)
        (home / name).write_text(code)
    url = f"sqlite:///{home / 'queue.db'}"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=home,
        env={
            **os.environ,
            "UMBEL_BROKER": url,
            "UMBEL_BACKEND": url,
            "DJANGO_SETTINGS_MODULE": "shop.settings",
        },
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_the_site_of_fastapi_sends_and_asks(tmp_path: Path) -> None:
    readers = {
        "shop/__init__.py": "",
        "shop/tasks.py": """
from umbel import App

app = App("shop")

@app.task
def pack(number: int) -> None: ...
""",
    }
    program = """
from fastapi.testclient import TestClient
from shop.api import site

with TestClient(site) as browser:
    task = browser.post("/orders/7").json()["task"]
    assert browser.get(f"/orders/{task}").json() == {"state": "PENDING"}
from shop.tasks import app
assert app.control.purge() == 1
"""
    run(tmp_path, "fastapi.md", readers, program)


def test_the_tasks_of_flask_run_in_the_application_context(tmp_path: Path) -> None:
    readers = {
        "shop/tasks.py": """
from types import SimpleNamespace
from flask import current_app

class Order: state = ""
orders = {7: Order()}
def get(_kind, number):
    assert current_app.name == "shop"
    return orders[number]
db = SimpleNamespace(session=SimpleNamespace(get=get, commit=lambda: None))
"""
    }
    program = """
import wsgi
from shop.tasks import orders, pack, umbel

with umbel.eager():
    pack.delay(7).get()
assert orders[7].state == "packed"
assert wsgi.umbel is umbel and wsgi.app.config["UMBEL"]["broker"] == "redis://localhost"
"""
    run(tmp_path, "flask.md", readers, program)


def test_the_view_of_django_sends_when_its_transaction_commits(tmp_path: Path) -> None:
    readers = {
        "shop/__init__.py": "",
        "shop/models.py": """
from django.db import models

class Order(models.Model):
    number = models.IntegerField()
    state = models.CharField(max_length=20, default="new")
""",
        "shop/settings.py": """
DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": "shop.db"}}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
""",
    }
    program = """
import django

django.setup()
from django.db import connection
from shop.models import Order

with connection.schema_editor() as editor:
    editor.create_model(Order)
from shop.views import order
from umbel.contrib.django import app

assert "shop.tasks.pack" in app.tasks
with app.eager():
    order(None, 7)
assert [one.state for one in Order.objects.all()] == ["packed"]
"""
    run(tmp_path, "django.md", readers, program)


def test_a_celery_project_runs_without_a_server(tmp_path: Path) -> None:
    [block] = [one for one in blocks_of(DOCS / "celery.md") if one.text.startswith("$ export UMBEL_BROKER")]
    variables, worker, call = block.text.split("$ ")[1:]
    (tmp_path / "proj").mkdir()
    (tmp_path / "proj/__init__.py").touch()
    (tmp_path / "proj/celery.py").write_text(
        "from celery import Celery\n"
        "app = Celery('proj', broker='amqp://', backend='rpc://', include=['proj.tasks'])\n"
    )
    (tmp_path / "proj/tasks.py").write_text(
        "from proj.celery import app\n@app.task\ndef add(x, y): return x + y\n"
    )
    stated = dict(one.split("=", 1) for one in variables.split()[1:])
    with Terminal(tmp_path, **stated) as terminal:
        terminal.start(worker.removesuffix("&\n").strip())
        terminal.type(Block(block.place, "console", f"$ {call.replace('--wait 5', '--wait 60')}", ""))
