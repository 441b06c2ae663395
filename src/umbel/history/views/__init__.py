"""Views: answers that are computed from the tables when they are asked for, by SQL that is written once.

They need no build of their own: an earlier version's tables have them too. Each view is described
column by column, as the tables are (`events/tables.py`), and read in the same way.
"""

from collections.abc import Mapping

from umbel.history.views.compared import COMPARED
from umbel.history.views.lost_time import LOST_TIME
from umbel.history.views.queues import QUEUES
from umbel.history.views.unusual import UNUSUAL
from umbel.history.views.view import View
from umbel.history.views.workflows import WORKFLOWS

VIEWS: Mapping[str, View] = {
    view.table.name: view for view in (WORKFLOWS, QUEUES, LOST_TIME, UNUSUAL, COMPARED)
}
"""By name, in the order in which they are made."""
