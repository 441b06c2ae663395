"""Writers and relays killed at every step: what was committed is published, once, in order; nothing else."""

import os
import subprocess
import sys
from itertools import groupby
from pathlib import Path

import pytest

from tests.outbox.dying import RELAY_STEPS, TASKS
from tests.outbox.places import Place
from tests.outbox.test_relay import in_queue
from tests.servers.redis import redis_server, redis_url  # noqa: F401 (fixtures)
from umbel import App

SOAK = os.environ.get("UMBEL_SOAK") == "1"
ROUNDS = 25 if SOAK else 1


@pytest.mark.parametrize("broker", ["sqlite", "redis"])
def test_what_was_committed_is_published_once_and_in_order_whoever_is_killed(
    place: Place, broker: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if broker == "redis" and place.is_sqlite and not SOAK:
        pytest.skip("each database and each broker is there without it")
    url = f"sqlite:///{tmp_path}/umbel.db" if broker == "sqlite" else request.getfixturevalue("redis_url")
    place.run("CREATE TABLE orders (transaction_name text, number int, task_id text)")
    words = [sys.executable, "-m", "tests.outbox.dying", place.url, url, str(ROUNDS)]
    done = subprocess.run(words, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    with place.connection() as connection:
        orders = connection.execute("SELECT task_id, transaction_name, number FROM orders").fetchall()
    committed = {task_id: (transaction, number) for task_id, transaction, number in orders}
    assert len(committed) == TASKS * (1 + len(RELAY_STEPS)) * ROUNDS

    app = App("shop", broker=url)
    published = in_queue(app)
    app.close()
    assert sorted(published) == sorted(committed)  # nothing lost, nothing twice, nothing rolled back
    in_order = [list(part) for _, part in groupby(map(committed.__getitem__, published), lambda one: one[0])]
    assert all([number for _, number in part] == list(range(TASKS)) for part in in_order)
    assert place.ids() == []
