"""WorkerState: what control commands see and change of this worker (`control.state.ControlState`)."""

from umbel.worker.remote.cluster import WorkerCluster
from umbel.worker.remote.limits import WorkerLimits
from umbel.worker.remote.looking import WorkerLooking
from umbel.worker.remote.pool import WorkerPool
from umbel.worker.remote.queues import WorkerQueues
from umbel.worker.remote.tasks import WorkerTasks


class WorkerState(WorkerLooking, WorkerTasks, WorkerLimits, WorkerQueues, WorkerPool, WorkerCluster):
    """Every section, on the same parts of the worker."""
