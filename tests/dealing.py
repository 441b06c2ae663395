"""How files of tests are dealt to the processes that run them: whole, and the longest first.

A file's tests stay in one process, because they share what its fixtures start. So do files that share
something slow: Spark, or the clusters of Umbel and Celery, which would start anew for each file.
Long files come first: at the end, a process that has nothing left waits for the other's last file.
"""

from xdist.scheduler import LoadFileScheduling

TOGETHER = ("tests/pipeline", "tests/interop")
# What takes long, the longest first; all else follows by number of tests. `--durations 0` tells.
LONGEST = (
    "tests/pipeline",
    "tests/interop",
    "tests/brokers/test_amqp.py",
    "tests/scenarios/test_demo.py",
    "tests/docs/test_guide.py",
    "tests/web/pages/test_actions.py",
    "tests/scenarios/test_membership.py",
    "tests/web/pages/test_pages.py",
    "tests/scenarios/test_control.py",
    "tests/docs/test_site.py",
    "tests/contrib/test_django.py",
    "tests/mutants/test_mutations.py",
    "tests/pools/test_prefork_contract.py",
    "tests/scenarios/test_elections.py",
    "tests/web/pages/test_celery_pages.py",
    "tests/contrib/test_fastapi.py",
    "tests/brokers/test_redis.py",
    "tests/scenarios/test_chaos.py",
    "tests/scenarios/test_signing.py",
    "tests/examples/test_examples.py",
    "tests/brokers/test_amqp_leases.py",
    "tests/scenarios/test_replaced_store.py",
    "tests/scenarios/test_ownership.py",
    "tests/scenarios/test_periodic.py",
    "tests/scenarios/test_recorder.py",
    "tests/scenarios/test_outages.py",
    "tests/scenarios/test_corpus.py",
    "tests/scenarios/test_progress.py",
    "tests/scenarios/test_deadlines.py",
    "tests/benchmarks/test_embedded.py",
    "tests/brokers/test_amqp_healing.py",
    "tests/scenarios/test_worker.py",
    "tests/scenarios/test_pool.py",
    "tests/web/test_api.py",
    "tests/celery_apps/test_control_commands.py",
    "tests/scenarios/test_rolling.py",
    "tests/brokers/test_sqlite.py",
    "tests/pools/test_prefork_faults.py",
    "tests/scenarios/test_clocks.py",
    "tests/pools/test_gevent.py",
    "tests/scenarios/test_commands.py",
    "tests/app/test_typing.py",
    "tests/pools/test_prefork_dispatch.py",
    "tests/scenarios/test_awaited.py",
    "tests/pools/test_prefork_processes.py",
    "tests/testing/test_projects.py",
    "tests/outbox/test_kills.py",
    "tests/history/test_recorder.py",
    "tests/scenarios/test_canvas.py",
    "tests/benchmarks/test_coordination.py",
)


def unit_of(file: str) -> str:
    """What is dealt as one: a file, or a folder whose files share something."""
    return next((folder for folder in TOGETHER if file.startswith(f"{folder}/")), file)


def weight_of(unit: str, tests: int) -> tuple[int, int]:
    """Of two units, the one with the greater weight is dealt first."""
    place = LONGEST.index(unit) if unit in LONGEST else len(LONGEST)
    return -place, tests


class LongestFirst(LoadFileScheduling):  # type: ignore[misc]
    def _split_scope(self, nodeid: str) -> str:
        return unit_of(super()._split_scope(nodeid))

    def _assign_work_unit(self, node: object) -> None:
        first = max(self.workqueue, key=lambda unit: weight_of(unit, len(self.workqueue[unit])))
        self.workqueue.move_to_end(first, last=False)
        super()._assign_work_unit(node)
