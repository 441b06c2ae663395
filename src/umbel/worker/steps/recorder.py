"""Recorder: writes the cluster's history, when this worker is the one to do it (D1).

Off unless the worker was given a lake. Of all workers and `umbel record` processes with the same
broker, the holder of the lease `recorder` records; the others wait for it to die. Decoding and
Parquet run in a thread of their own. A lake that cannot be used is said again and again, and never
stops the worker: tasks matter more than their history.
"""

import asyncio
import logging
from pathlib import Path

from umbel.errors import ConfigurationError, UmbelError
from umbel.worker.bootsteps import Step
from umbel.worker.context import WorkerContext

log = logging.getLogger("umbel.history")
AGAIN_S = 30.0
STOP_S = 15.0
READ_MAX = 1000


class RecorderStep(Step):
    name = "recorder"
    requires = ("connection",)

    def __init__(self, context: WorkerContext) -> None:
        super().__init__()
        self._context = context
        self._stop = asyncio.Event()

    async def start(self) -> None:
        lake = self._context.settings.history_lake
        if lake is None:
            return
        capabilities = self._context.broker.capabilities
        if not (capabilities.event_log and capabilities.leases):
            missing = "leases" if capabilities.event_log else "event_log"
            log.warning("history recording disabled: %s", capabilities.why_not(missing))
            return
        # Only who records needs any of this.
        from umbel.history.arrow import arrow

        await asyncio.to_thread(arrow)  # fail at once if history is asked for and not installed
        self.run_in_background(self._record(lake))

    async def stop(self) -> None:
        self._stop.set()
        if self._background:
            await asyncio.wait(self._background, timeout=STOP_S)
        await self.end_background()

    async def _record(self, lake: Path | str) -> None:
        from umbel.history.recorder import RecorderSettings
        from umbel.worker.recording import RecorderCandidate, RecordingSettings

        # The connection is the worker's: a large answer would hold up what it does for tasks.
        recorder = RecorderSettings(read_max=READ_MAX)
        chosen = self._context.settings
        settings = RecordingSettings(
            lake, recorder, lease_s=chosen.lease_s, lake_mode=chosen.history_lake_mode
        )
        campaigns = 0
        while not self._stop.is_set():
            campaigns += 1
            owner = f"{self._context.identity.owner}.recorder.{campaigns}"
            candidate = RecorderCandidate(
                self._context.broker, settings, owner, outages=self._context.outages
            )
            try:
                await candidate.run(self._stop)
            except ConfigurationError:
                raise
            except UmbelError as error:
                log.error("cannot record history; retrying in %g s: %s", AGAIN_S, error)
                try:
                    async with asyncio.timeout(AGAIN_S):
                        await self._stop.wait()
                except TimeoutError:
                    continue
