"""StateStore: saves the node's clock and identity, so that a restart goes on from there.

Saved at the start, every few seconds and at the end. A save that fails is reported once, and the
worker runs on with the file it saved before. One save at a time: a thread that saves goes on although
nobody waits for it any more, so the last save waits for it.
"""

import asyncio
import logging
from pathlib import Path

from umbel.worker.bootsteps import Step
from umbel.worker.context import WorkerContext
from umbel.worker.process.saved_state import SavedState, save, saved_file
from umbel.worker.steps.events import Events

log = logging.getLogger("umbel.worker.state_store")

SAVE_EVERY_S = 5.0


class StateStore(Step):
    name = "state_store"
    requires = ("events",)

    def __init__(self, context: WorkerContext, events: Events, saved: SavedState | None) -> None:
        super().__init__()
        self._context = context
        self._events = events
        self._saved = saved
        self._failing = False
        self._saving: asyncio.Future[None] | None = None
        identity = context.identity
        self._path: Path = saved_file(context.settings.run_directory, identity.node, context.broker.url)

    async def start(self) -> None:
        if self._saved is not None:
            self._events.clock.adjust(self._saved.clock)
        await self._save()
        self.run_in_background(self._save_on())

    async def stop(self) -> None:
        await self.end_background()
        if self._saving is not None:
            await asyncio.gather(self._saving, return_exceptions=True)
        await self._save()

    async def _save_on(self) -> None:
        while True:
            await asyncio.sleep(SAVE_EVERY_S)
            await self._save()

    async def _save(self) -> None:
        identity = self._context.identity
        state = SavedState(identity.node, self._events.clock.value, identity.incarnation)
        try:
            self._saving = asyncio.ensure_future(asyncio.to_thread(save, self._path, state))
            await asyncio.shield(self._saving)
        except OSError as error:
            if not self._failing:
                fields = {"file": str(self._path), "why": str(error)}
                log.error("cannot save the node state; the worker continues, retrying", extra=fields)
            self._failing = True
        else:
            if self._failing:
                log.info("node state saved again", extra={"file": str(self._path)})
            self._failing = False
