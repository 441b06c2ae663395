"""An exception for a job reaches that job or nobody (F6)."""

import threading
import time

from tests.pools.host import make_job
from umbel.errors import SoftTimeLimitExceeded
from umbel.pools import threads as workers
from umbel.pools.interface import Job, Outcome


def test_an_exception_that_comes_when_the_job_has_ended_hits_nobody() -> None:
    """The loop has decided to raise; before it does, the job returns."""
    run = workers._ThreadRun(threading.get_ident())
    assert run.take_ticket()
    returned, raised = threading.Event(), threading.Event()

    def raise_late() -> None:
        returned.wait(10)
        workers._raise_in(run.ident, SoftTimeLimitExceeded)
        run.raised = True
        raised.set()

    def runner(job: Job) -> Outcome:
        returned.set()
        return Outcome(job.number, "success", time.time(), 0.0)

    late = threading.Thread(target=raise_late)
    late.start()
    outcome = workers._run(runner, make_job(1), run)
    late.join(10)
    assert raised.is_set()
    assert outcome.kind == "success"


def test_a_job_that_has_ended_is_not_raised_in() -> None:
    run = workers._ThreadRun(threading.get_ident())
    workers._run(lambda job: Outcome(job.number, "success", time.time(), 0.0), make_job(1), run)
    assert not run.take_ticket()
