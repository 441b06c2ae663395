"""Does a FastAPI site that sends a task for each request stay as responsive as one that sends nothing?

Two sites under uvicorn, side by side under the same load: one awaits `aapply_async` on Redis for each
request, the other only answers. Meanwhile Redis stands still for four seconds (SIGSTOP). Then: the longest
time that each loop was away; whether every send that was acknowledged ran, and no id ran twice; how long the
others took to raise.

    .venv/bin/python benchmarks/fastapi_client.py [--json] [--rounds N] [--rate N] [--seconds N] [--freeze N]

On a busy machine a loop is also away because other processes have the CPU; `own` leaves that out, as far as
the kernel knows it.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.servers.ports import free_port
from tests.servers.redis import RedisServer
from tests.waiting import wait_until

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT_S = 2.0  # of a send
LONGER_MAX_S = 0.05  # that the loop may be away beyond the bare one's
RUN_S = 120.0  # for what was sent to run
SLACK_S = 0.1  # beside the time that the loop was away when the time-out was due


def main() -> int:
    options = _options()
    rounds = [measure(options.rate, options.seconds, options.freeze) for _ in range(options.rounds)]
    print(json.dumps(rounds) if options.json else "\n\n".join(map(as_text, rounds)))
    return 0 if all(one["sound"] for one in rounds) else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--rate", type=float, default=500.0, help="requests a second to each site")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--freeze", type=float, default=4.0)
    return parser.parse_known_args()[0]


def measure(rate: float, seconds: float, freeze_s: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="umbel-fastapi-") as name:
        home = Path(name)
        (home / "ledger").mkdir()
        redis = RedisServer(home)
        redis.start()
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")]),
            "SITE_REDIS": redis.url,
            "SITE_LEDGER": str(home / "ledger"),
            "SITE_TIMEOUT_S": str(TIMEOUT_S),
        }
        try:
            return _under_load(redis, home, environment, rate, seconds, freeze_s)
        finally:
            redis.resume()
            redis.stop()


def _under_load(
    redis: RedisServer,
    home: Path,
    environment: Mapping[str, str],
    rate: float,
    seconds: float,
    freeze_s: float,
) -> dict[str, Any]:
    ports = [str(free_port()) for _ in range(2)]
    worker = [sys.executable, "-m", "umbel", "worker", "-A", "benchmarks._fastapi.tasks:app", "-c", "2"]
    site = [sys.executable, "-m", "benchmarks._fastapi.site"]
    load = [sys.executable, "-m", "benchmarks._fastapi.load", *ports, str(rate), str(seconds)]
    with (
        _running([*worker, "-l", "warning"], home, environment),
        _running([*site, "subject", ports[0]], home, environment),
        _running([*site, "bare", ports[1]], home, environment),
    ):
        for port in ports:
            wait_until(lambda port=port: _listens(int(port)), deadline_s=60.0, what="a site")  # type: ignore[misc]
        loading = subprocess.Popen(load, cwd=ROOT, env=environment, stdout=subprocess.PIPE)
        time.sleep(seconds * 0.4)
        redis.pause()
        time.sleep(freeze_s)
        redis.resume()
        told, _ = loading.communicate(timeout=5 * seconds + 120)
        answers = json.loads(told)
        subject, bare = answers["sites"]
        return {"rate": answers["rate"], **judged(subject, bare, home / "ledger")}


def judged(subject: dict[str, Any], bare: dict[str, Any], ledger: Path) -> dict[str, Any]:
    acknowledged = set(subject["acknowledged"])
    wait_until(lambda: acknowledged <= _runs(ledger).keys(), deadline_s=RUN_S, what="what was sent to run")
    runs = _runs(ledger)
    found = {
        "requests": len(acknowledged) + sum(subject["raised"].values()) + subject["broken"],
        "acknowledged": len(acknowledged),
        "acknowledged_and_did_not_run": len(acknowledged - runs.keys()),
        "ran_twice": sum(count > 1 for count in runs.values()),
        "raised": subject["raised"],
        "raised_but_ran": len(runs.keys() - acknowledged),
        "raised_longest_s": subject["raised_longest_s"],
        "timeout_s": TIMEOUT_S,
        "no_answer": subject["broken"] + bare["broken"],
        "send_median_s": subject["median_s"],
        "loop_longest_s": subject["longest_s"],
        "bare_longest_s": bare["longest_s"],
        "loop_longest_own_s": subject["longest_own_s"],
        "bare_longest_own_s": bare["longest_own_s"],
    }
    return found | {"sound": _is_sound(found)}


def _is_sound(found: Mapping[str, Any]) -> bool:
    return bool(
        not found["acknowledged_and_did_not_run"]
        and not found["ran_twice"]
        and not found["no_answer"]
        and found["raised_longest_s"] <= TIMEOUT_S + found["loop_longest_s"] + SLACK_S
        and found["loop_longest_own_s"] <= found["bare_longest_own_s"] + LONGER_MAX_S
    )


def as_text(found: Mapping[str, Any]) -> str:
    raised = ", ".join(f"{count} {kind}" for kind, count in found["raised"].items()) or "none"
    ms = {name: round(value * 1000) for name, value in found.items() if name.endswith("_s")}
    lines = [
        f"{found['requests']} requests to each site, {found['rate']:.0f} a second",
        f"{found['acknowledged']} acknowledged, raised: {raised}",
        f"acknowledged and did not run: {found['acknowledged_and_did_not_run']}",
        f"ran twice: {found['ran_twice']}; raised but ran: {found['raised_but_ran']}",
        f"no answer: {found['no_answer']}; median of all sends: {ms['send_median_s']} ms",
        f"longest until it raised: {ms['raised_longest_s']} ms (time-out {ms['timeout_s']} ms)",
        f"loop away at most: {ms['loop_longest_s']} ms, bare {ms['bare_longest_s']} ms",
        f"of that its own: {ms['loop_longest_own_s']} ms, bare {ms['bare_longest_own_s']} ms",
        "as promised" if found["sound"] else "NOT as promised",
    ]
    return "\n".join(lines)


def _runs(ledger: Path) -> Counter[str]:
    return Counter(line for file in ledger.iterdir() for line in file.read_text().splitlines())


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@contextmanager
def _running(command: Sequence[str], home: Path, environment: Mapping[str, str]) -> Iterator[None]:
    with (home / "log.txt").open("ab") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, env=dict(environment), stderr=log, stdin=subprocess.DEVNULL
        )
    try:
        yield
    finally:
        process.terminate()
        process.wait(60)


if __name__ == "__main__":
    sys.exit(main())
