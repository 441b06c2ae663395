"""TABLE: a verdict for every setting of Celery 5.7 (`celery.app.defaults`), from the rows of `table/`.

`configuration.py` maps by it, `umbel celery check` and a starting worker report by it, and the page
docs/celery-settings.md is made from it. It imports nothing of Celery, so that the page can be made without.
"""

from collections.abc import Mapping

from umbel.celery.table import broker, results, tasks, worker
from umbel.celery.table.verdicts import Row

TABLE: Mapping[str, Row] = {row.name: row for row in (*tasks.ROWS, *worker.ROWS, *broker.ROWS, *results.ROWS)}
