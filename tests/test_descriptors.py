"""A process that may open no more files says so, with the limit and the remedy."""

import errno
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.waiting import DEADLINE_S
from umbel import files
from umbel.brokers.amqp.handshake import locations_from_url
from umbel.brokers.amqp.handshake import unreachable as rabbitmq_unreachable
from umbel.brokers.interface import BrokerSettings
from umbel.brokers.redis.address import parse_address
from umbel.brokers.redis.replies import unreachable as redis_unreachable
from umbel.brokers.registry import open_producer
from umbel.cli import exits
from umbel.errors import BrokerUnavailable
from umbel.wire.message import Message, Outgoing

REMEDY = "raise it with `ulimit -n 1024`, or LimitNOFILE=1024 in its systemd unit"
NO_MORE = OSError(errno.EMFILE, "Too many open files")
APP = """
from umbel import App

app = App("tasks", broker="sqlite:///{broker}")
"""


@contextmanager
def all_taken_but(left: int) -> Iterator[int]:
    """While the block runs, this process can open so many files more; its limit."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = max(files.opened()) + 1 + left
    taken: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, before[1]))
    try:
        while not files.none_left():
            taken.append(os.open(os.devnull, os.O_RDONLY))
        for _ in range(left):
            os.close(taken.pop())
        yield most
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for one in taken:
            os.close(one)


def test_the_limit_and_the_remedy_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "limit", lambda: 64)
    assert files.ran_out(NO_MORE) == f"too many open files: the limit of this process is 64; {REMEDY}"
    assert "fs.file-max" in files.ran_out(OSError(errno.ENFILE, "Too many open files in system"))
    assert files.ran_out(OSError(errno.EACCES, "Permission denied")) == ""
    assert files.ran_out(ValueError("no errno")) == ""
    assert files.none_left() == ""


@pytest.mark.parametrize(
    ("children", "is_green", "most", "needed"),
    [
        (16, False, 68, 69),
        (16, False, 69, 0),
        (0, False, 20, 21),
        (1, True, 35, 36),
        (400, False, 1024, 1221),
    ],
)
def test_a_worker_is_refused_if_its_children_would_need_more(
    children: int, is_green: bool, most: int, needed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "limit", lambda: most)
    monkeypatch.setattr(files, "opened", lambda: set(range(5)))
    problem = files.too_few_for(children, is_green=is_green)
    if not needed:
        assert problem == ""
        return
    assert f"needs at least {needed:,}, and the limit is {most:,}" in problem
    assert f"ulimit -n {1024 if needed < 512 else 4096}" in problem
    assert ("fewer child processes" in problem) is (children > 1)


def test_where_nobody_can_tell_the_limit_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "limit", lambda: None)
    assert files.too_few_for(10_000, is_green=False) == ""


def test_a_broker_that_cannot_be_reached_for_lack_of_descriptors_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "limit", lambda: 64)
    for problem in (
        redis_unreachable(parse_address("redis://h/0"), NO_MORE, 1.0),
        rabbitmq_unreachable(locations_from_url("amqp://h")[0], NO_MORE),
    ):
        assert str(problem).endswith(f"the limit of this process is 64; {REMEDY}")


@pytest.mark.parametrize("left", range(4))
def test_the_embedded_broker_does_not_blame_the_rights_of_its_file(left: int, tmp_path: Path) -> None:
    """Whichever of its files is the first that cannot be opened."""
    sent = [Outgoing("celery", Message(b"{}", b"[]"))]
    producer = open_producer(BrokerSettings(f"sqlite:///{tmp_path / 'queue.db'}"))
    with all_taken_but(left) as most, pytest.raises(BrokerUnavailable) as refused:
        producer.publish(sent)
    assert f"too many open files: the limit of this process is {most};" in str(refused.value)
    assert "writable" not in str(refused.value)
    producer.publish(sent)  # there are files again
    producer.close()


@pytest.mark.parametrize("pool", ["prefork", "gevent", "asyncio"])
def test_a_worker_that_may_open_too_few_files_ends_at_once_and_says_why(pool: str, tmp_path: Path) -> None:
    (tmp_path / "tasks.py").write_text(APP.format(broker=tmp_path / "queue.db"))
    most = 64 if pool == "prefork" else 24
    worker = [sys.executable, "-m", "umbel.cli.main", "worker", "-P", pool, "-c", "40"]
    done = subprocess.run(
        ["sh", "-c", f'ulimit -n {most}; exec "$@"', "sh", *worker],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == exits.USAGE
    (said,) = done.stderr.splitlines()
    assert said.startswith("umbel: too few open files are allowed: a worker")
    assert f"and the limit is {most}; {REMEDY}" in said
    assert not (tmp_path / "queue.db").exists()  # nothing was begun
