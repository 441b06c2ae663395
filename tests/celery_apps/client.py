"""The client: runs the cases of one deployment against its worker, and prints what came of each.

Run with Celery's Python. Cases that leave others alone run at the same time.
"""

import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor

from tests.celery_apps import cases  # noqa: F401  # registers them
from tests.celery_apps.asking import CASES, Case, outcome_of
from tests.celery_apps.project.celery import app

AT_ONCE = 16


def chosen(names: str, setup: str) -> list[Case]:
    """`quick`, `all`, or names with commas between them."""
    here = [case for case in CASES.values() if setup in case.setups]
    if names == "all":
        return here
    if names == "quick":
        return [case for case in here if case.quick]
    return [case for case in here if case.name in names.split(",")]


def main() -> None:
    app.set_default()  # also for the threads
    app.finalize()
    app.loader.import_default_modules()
    wanted = chosen(sys.argv[1], os.environ["SETUP"])
    with ThreadPoolExecutor(AT_ONCE) as pool:
        together = [case for case in wanted if not case.alone]
        outcomes = dict(zip([case.name for case in together], pool.map(outcome_of, together), strict=True))
    for case in wanted:
        if case.alone:
            outcomes[case.name] = outcome_of(case)
    print(json.dumps(outcomes), flush=True)
    os._exit(0)  # threads of connections are not waited for


if __name__ == "__main__":
    main()
