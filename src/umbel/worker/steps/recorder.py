"""Recorder: has the cluster's history recorded, by a separate process next to this worker (D1).

Off unless the worker was given the command for it. Of all workers and `umbel record` processes with the same
broker, the holder of the lease `recorder` records. While the lease is held, this step only watches it. When
it is free, the step starts the process, which ends by itself if another one was quicker. Tasks matter more
than their history: decoding and Parquet cost the worker's loop nothing, and an unusable lake is reported
again, ever more rarely, and never stops the worker.
"""

import asyncio
import logging

from umbel.chance import uniform
from umbel.errors import BrokerError
from umbel.worker.bootsteps import Step
from umbel.worker.sidecar import run_sidecar

log = logging.getLogger("umbel.history")
RECORDER_LEASE = "recorder"
CHECK_EVERY_S = 0.5
SPREAD_S = 2.0
STOP_S = 15.0  # to write the events it has read


class RecorderStep(Step):
    """The step that watches the lease and starts the process."""

    name = "recorder"
    requires = ("connection",)

    async def start(self) -> None:
        """Begin to watch, if a recorder is configured and the broker can record."""
        recorder = self._context.settings.recorder
        if recorder is None:
            return
        capabilities = self._context.broker.capabilities
        if not (capabilities.event_log and capabilities.leases):
            missing = "leases" if capabilities.event_log else "event_log"
            log.warning("history recording disabled: %s", capabilities.why_not(missing))
            return
        self.run_in_background(run_sidecar(recorder, until_due=self._until_nobody_records, stop_s=STOP_S))

    async def _until_nobody_records(self) -> None:
        """Return when the lease is free; after another recorder's end it waits a random time more."""
        outages, was_recorded = self._context.outages, False
        while True:
            try:
                lease = await self._context.broker.coordination.read_lease(RECORDER_LEASE)
            except BrokerError as error:
                outages.failed(self.name, error)
            else:
                outages.worked(self.name)
                if not lease.holder and not was_recorded:
                    return
                was_recorded = bool(lease.holder)
            await asyncio.sleep(CHECK_EVERY_S + (0 if was_recorded else uniform(0, SPREAD_S)))
