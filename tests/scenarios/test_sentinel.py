"""A primary dies under load, and the sentinels make its replica the primary.

Redis answers a client before a replica has the write. So of what was acknowledged, that which a replica had
confirmed is never lost; what was sent in the last moments may be, and is counted here.
"""

import os
import signal
from collections import Counter
from pathlib import Path
from threading import Event, Thread

import pytest

from tests.cluster import Cluster
from tests.scenarios.chaos_tasks import journal_of
from tests.servers.certificates import make_certificates
from tests.servers.redis import RedisServer, exchange
from tests.servers.sentinel import MASTER, Watched, WatchedOverTls, watched
from tests.waiting import wait_until
from umbel.app.app import App
from umbel.errors import BrokerError, BrokerUnavailable

ROOT = str(Path(__file__).parents[2])
TASKS_FILE = Path(__file__).with_name("failover_tasks.py")
SOAK = bool(os.environ.get("UMBEL_SOAK"))
FAILOVERS = 20 if SOAK else 1
SENDS = 300
LONG_S = 60.0
pytestmark = [pytest.mark.scenario, pytest.mark.timeout(1800 if SOAK else 180)]


def is_proven(primary: RedisServer) -> bool:
    """Whether a replica has confirmed everything that was written until now."""
    try:
        _, confirmed = exchange(primary.port, [("INCR", "test.probe"), ("WAIT", 1, 200)])
    except OSError:
        return False
    return confirmed == 1


class Sender(Thread):
    """Sends without a pause. `acknowledged`: by id, whether a replica is known to have it."""

    def __init__(self, app: App, directory: Path, watch: Watched) -> None:
        super().__init__(daemon=True)
        self.acknowledged: dict[str, bool] = {}
        self._task = app.tasks["failover_tasks.noted"]
        self._directory, self._watch = str(directory), watch
        self._is_over = Event()

    def run(self) -> None:
        primary = self._watch.primary
        while not self._is_over.is_set():
            try:
                sent = self._task.delay(self._directory)
            except BrokerError:
                continue
            self.acknowledged[sent.id] = proven = is_proven(primary)
            if not proven:
                primary = self._watch.primary

    def wait_for(self, count: int) -> None:
        """Until so many more are proven."""
        enough = self.proven + count
        wait_until(lambda: self.proven >= enough, deadline_s=LONG_S, what=f"{count} more tasks to be sent")

    @property
    def proven(self) -> int:
        return sum(self.acknowledged.copy().values())

    def stop(self) -> None:
        self._is_over.set()
        self.join()


def ran(directory: Path) -> Counter[str]:
    journal = journal_of(str(directory))
    return Counter(journal.read_text().split()) if journal.exists() else Counter()


def fail_over(watch: Watched) -> None:
    """Kill the primary; it comes back as a replica of the other."""
    old = watch.primary
    old.stop(signal.SIGKILL)
    wait_until(lambda: watch.primary is not old, deadline_s=LONG_S, what="the replica to be the primary")
    new = watch.primary
    wait_until(lambda: is_primary(new), deadline_s=LONG_S, what="it to know")
    old.start()


def is_primary(server: RedisServer) -> bool:
    role = server.ask("ROLE")
    assert isinstance(role, list)
    return bool(role[0] == b"master")


def test_what_a_replica_had_is_run_after_a_failover(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((ROOT, os.environ.get("PYTHONPATH", ""))))
    with (
        watched(tmp_path / "servers") as watch,
        Cluster(tmp_path, TASKS_FILE, broker=watch.url, lease_s=2.0, connect_timeout_s=2.0) as cluster,
    ):
        for name in ("one", "two"):
            cluster.start_worker(name, "-c", "1")
        sender = Sender(cluster.app, tmp_path, watch)
        sender.start()
        for _ in range(FAILOVERS):
            sender.wait_for(SENDS)
            fail_over(watch)
            wait_until(watch.is_ready, deadline_s=LONG_S, what="the old primary to follow")
        sender.wait_for(SENDS)
        sender.stop()
        acknowledged = sender.acknowledged
        proven = {sent for sent, is_known in acknowledged.items() if is_known}
        wait_until(lambda: proven <= set(ran(tmp_path)), deadline_s=LONG_S, what="what was proven to run")
        log = cluster.log("one") + cluster.log("two")
        status = cluster.umbel("status").stdout
    runs = ran(tmp_path)
    lost = set(acknowledged) - set(runs)
    print(
        f"{FAILOVERS} fail-overs: acknowledged {len(acknowledged)}, of which {len(proven)} were confirmed "
        f"by a replica; lost of those 0, of the others {len(lost)}; run more than once "
        f"{sum(count > 1 for count in runs.values())}"
    )
    assert f"{MASTER} (by the sentinel at 127.0.0.1:" in log
    assert "two" in status and "one" in status


def test_a_client_is_told_when_no_sentinel_knows_the_master(tmp_path: Path) -> None:
    with watched(tmp_path) as watch:
        wrong = App("x", broker=watch.url.replace(f"={MASTER}", "=nobody"), connect_timeout_s=0.5)
        with pytest.raises(BrokerUnavailable, match=r"no master called 'nobody'; check master_name"):
            wrong.send_task("t")


def test_a_client_and_a_worker_find_their_primary_over_tls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((ROOT, os.environ.get("PYTHONPATH", ""))))
    made = make_certificates(tmp_path)
    with WatchedOverTls(tmp_path / "servers", made) as watch:
        _, port = watch.sentinel(made.server)
        url = f"sentinels://127.0.0.1:{port}/0?master_name={MASTER}&{made.options}"
        with Cluster(tmp_path, TASKS_FILE, broker=url) as cluster:
            wrong = url.replace(str(made.authority), str(made.stranger.certificate))
            refused = cluster.start_worker("refused", wait=False, broker=wrong)
            cluster.start_worker("one", "-c", "1")
            sent = cluster.app.tasks["failover_tasks.noted"].delay(str(tmp_path))
            assert sent.get(timeout=LONG_S) is None and ran(tmp_path) == {sent.id: 1}
            assert refused.wait(LONG_S) == 69
            line = cluster.log("refused").splitlines()[-1]
            assert f"ssl_ca_certs={made.stranger.certificate} does not know it; set ssl_ca_certs=FILE" in line
