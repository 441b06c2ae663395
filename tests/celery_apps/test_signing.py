"""A Celery project whose workers have keys: what Umbel sends for it is signed, what Celery sends is not."""

import pickle
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tests.celery_apps.programs import PYTHON, START_S, Home, end
from tests.scenarios.places import place
from tests.waiting import wait_until
from umbel import App
from umbel.wire.message import Outgoing

PROJECT = "tests.celery_apps.signed_project"
KEYS = "first:" + "f" * 32
UNSIGNED = 6  # that `send_unsigned` has land where a signature is needed
pytestmark = [pytest.mark.scenario, pytest.mark.timeout(240)]


class Explosive:
    """A pickle of it leaves a file where it is read."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self._file,)


@contextmanager
def worker(home: Home, name: str, *options: str, **more: str) -> Iterator[None]:
    log = home.directory / f"{name}.log"
    command = [str(PYTHON), "-m", "umbel", "worker", "-A", PROJECT, "-n", name, "-c", "1", *options]
    with log.open("ab") as file:
        environment = home._environment() | more
        process = subprocess.Popen(command, env=environment, cwd=home.directory, stdout=file, stderr=file)
    try:

        def is_ready() -> bool:
            assert process.poll() is None, log.read_text()
            return "worker ready" in log.read_text()

        wait_until(is_ready, deadline_s=START_S, what="the worker to be ready")
        yield
    finally:
        end(process)


@pytest.mark.parametrize("broker", ["redis", "amqp"])
def test_a_celery_project_with_keys(broker: str, tmp_path: Path) -> None:
    with place(broker, tmp_path, durable=False) as at, ExitStack() as stack:
        backend = at.backend if broker == "redis" else "rpc://"
        signed = {"UMBEL_SIGNING_KEYS": KEYS, "UMBEL_SIGNING_CLUSTER": "celery"}
        project = {"SIGNED_HOME": str(tmp_path), "SIGNED_BROKER": at.broker, "SIGNED_BACKEND": backend}
        home = Home(tmp_path, {**project, **signed})
        ours = stack.enter_context(
            closing(App("ours", broker=at.broker, signing_keys=[KEYS], signing_cluster="celery"))
        )
        stack.enter_context(worker(home, "internal", "-Q", "internal"))
        legacy = ("-Q", "legacy", "--without-schedule")
        stack.enter_context(worker(home, "legacy", *legacy, UMBEL_ACCEPT_UNSIGNED="legacy"))

        def runs() -> list[str]:
            file = tmp_path / "runs.txt"
            return file.read_text().split() if file.exists() else []

        def counted(*names: str) -> int:
            found = ours.control.inspect(timeout=20, limit=2).stats() or {}
            return sum(one["umbel"]["counters"][name] for one in found.values() for name in names)

        # What a worker sends is signed: the schedule, retries, callbacks, the next step of a chain.
        wait_until(lambda: runs().count("ticked") >= 2, what="the schedule")
        steps = [ours.signature(name, ["again"], queue="internal") for name in ("again", "note")]
        (steps[0] | steps[1]).delay()
        called = ours.signature("note", ["called"], queue="internal")
        called.immutable = True
        ours.signature("note", ["first"], queue="internal", link=[called]).delay()
        wait_until(lambda: {"first", "called"} <= set(runs()), what="the callback")
        wait_until(lambda: runs().count("again") == 2, what="the next step of the chain")
        assert counted("unsigned", "forged", "stale", "replayed") == 0

        # What Celery sends is not, and nothing that it causes is either.
        sent = home.run(PROJECT)
        assert sent.returncode == 0, sent.stderr
        wait_until(lambda: counted("unsigned") == UNSIGNED, what="what they cause to be refused")
        assert runs().count("legacy") == 2

        # Nothing is unpickled that nobody signed, although the project accepts pickles. A copy is a copy.
        genuine = ours.prepare("note", ["genuine"], {}, {"queue": "internal"}).outgoing
        ours.producer.publish([genuine, genuine])
        body = pickle.dumps([[Explosive(tmp_path / "exploded")], {}, {}])
        headers = genuine.message.headers.replace(b"umbel_signature", b"no_signature")
        bomb = replace(
            genuine.message,
            headers=headers,
            body=body,
            content_type="application/x-python-serialize",
            content_encoding="binary",
        )
        ours.producer.publish([Outgoing("legacy", bomb)])
        wait_until(lambda: counted("unsigned", "replayed") == UNSIGNED + 2, what="both to be refused")
        wait_until(lambda: "genuine" in runs(), what="the original to run")
        assert runs().count("genuine") == 1
        assert "evil" not in runs()
        assert not (tmp_path / "exploded").exists()
