"""RecorderCandidate: one candidate for the lease `recorder`; its holder records the history.

`umbel record` is a candidate; a worker with `--record` starts one when there is no recorder. When the holder
dies, the next one continues at the same place, which the broker stores. A stand-by only asks for the lease.
"""

import asyncio
import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from umbel.brokers.interface import Broker
from umbel.control.client import ControlClient
from umbel.coordination.driver import Change, LeaseKeeper
from umbel.errors import BrokerError, LakeBusy, LakeError
from umbel.history.housekeeping import compact, expire
from umbel.history.lake import Lake
from umbel.history.recorder import DEFAULT_NAME, Recorder, RecorderSettings
from umbel.protocol.leadership.lease import LeaseAcquired, LeaseSettings
from umbel.stores.interface import Where
from umbel.text import without_password
from umbel.worker.outages import Outages
from umbel.worker.steps.recorder import RECORDER_LEASE

log = logging.getLogger("umbel.history")

PART = "recorder"
LEASE_LOST = "recorder lease lost; recording stops until it is won again"
LEASE_S = 10.0
RENEWALS_PER_TTL = 3
ASK_EVERY_S = 0.5
LOOK_S = 0.1
CALL_S = 1.0
BUSY_S = 1.0
HOUSEKEEPING_AFTER_S, HOUSEKEEPING_EVERY_S = 60.0, 600.0


@dataclass(frozen=True, slots=True)
class RecordingSettings:
    """What is recorded where. `keep_days`: older days are deleted; None: never."""

    lake: Where
    recorder: RecorderSettings = field(default_factory=RecorderSettings)
    lease_s: float = LEASE_S
    keep_days: float | None = None
    lake_mode: int | None = None


def recorder_lease(name: str) -> str:
    """Return the lease for which recorders of this name compete."""
    return RECORDER_LEASE if name == DEFAULT_NAME else f"{RECORDER_LEASE}.{name}"


class RecorderCandidate:
    """Campaigns for the lease, and records while it has it.

    `elsewhere(who)` is called on the loop when another process is seen to record, `busy(why)` when the lake
    is locked although no other process has the lease. `quiet`: outages are not logged, because a worker next
    to it logs them.
    """

    def __init__(
        self,
        broker: Broker,
        settings: RecordingSettings,
        owner: str,
        *,
        quiet: bool = False,
        elsewhere: Callable[[str], None] = lambda _: None,
        busy: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.recorder: Recorder | None = None
        self.is_ready = False  # the workers have noticed this recorder
        self._broker = broker
        self._settings = settings
        self._outages = Outages("broker", without_password(broker.url), quiet=quiet)
        self._elsewhere, self._busy = elsewhere, busy
        self._acquired = asyncio.Event()
        ttl_s = settings.lease_s
        self._keeper = LeaseKeeper(
            broker.coordination,
            recorder_lease(settings.recorder.name),
            owner,
            settings=LeaseSettings(ttl_s=ttl_s, renew_s=ttl_s / RENEWALS_PER_TTL, ask_every_s=ASK_EVERY_S),
            changed=self._changed,
        )

    @property
    def leader(self) -> str:
        """The holder of the lease, as last seen; "" if it is free."""
        return self._keeper.leader

    async def run(self, stop: asyncio.Event) -> None:
        """Campaign for the lease, and record while this candidate has it, until `stop` is set."""
        campaign = asyncio.create_task(self._keeper.run(), name="umbel-recorder-lease")
        try:
            while not stop.is_set():
                await self._wait_for_turn(campaign, stop)
                if not stop.is_set():
                    await self._record(stop)
        finally:
            campaign.cancel()
            await asyncio.wait([campaign])
            await self._keeper.stop()
            self._outages.closed(PART)

    async def _wait_for_turn(self, campaign: asyncio.Task[None], stop: asyncio.Event) -> None:
        """Return when this candidate holds the lease; report the process that records meanwhile, once."""
        reported = ""
        while not stop.is_set() and not (self._acquired.is_set() and self._keeper.still_mine()):
            if campaign.done():
                campaign.result()
            if self.leader and self.leader not in (reported, self._keeper.holder):
                reported = self.leader
                self._outages.closed(PART)
                self._elsewhere(f"{reported} records already")
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await stop.wait()

    async def _record(self, stop: asyncio.Event) -> None:
        """Record while the lease is held, with a lake that is opened for this term."""
        lake = Lake(self._settings.lake, mode=self._settings.lake_mode)
        self.recorder = Recorder(
            self._broker,
            lake,
            self._settings.recorder,
            holding=self._keeper.still_mine,
            answered=partial(self._outages.report, PART),
        )
        helpers = [
            asyncio.create_task(self._keep_house(lake), name="umbel-housekeeping"),
            asyncio.create_task(self._call_workers(self.recorder), name="umbel-recorder-call"),
        ]
        try:
            await self.recorder.run(stop)
            if not stop.is_set():
                self._outages.consequence(log, logging.WARNING, LEASE_LOST, named="recorder stopped")
        except LakeBusy as error:  # the former holder may still be closing its file
            self._busy(str(error))
            with suppress(TimeoutError):
                async with asyncio.timeout(BUSY_S):
                    await stop.wait()
        finally:
            for task in helpers:
                task.cancel()
            await asyncio.wait(helpers)
            self.recorder, self.is_ready = None, False

    async def _call_workers(self, recorder: Recorder) -> None:
        """Make every worker notice the recorder at once; otherwise each checks every ten seconds.

        A heartbeat is requested, because Celery's workers send one on request, too: a worker without an event
        log is found by it, and asked for events.
        """
        await recorder.registered.wait()
        workers = 0
        try:
            answers = await ControlClient(self._broker).ask("heartbeat", timeout_s=CALL_S)
            workers = len(answers.replies)
        except BrokerError as error:
            log.debug(
                "cannot tell workers that a recorder is running; each notices it within seconds",
                extra={"why": str(error)},
            )
        self.is_ready = True
        self._outages.consequence(
            log,
            logging.INFO,
            "history recording started",
            named="recorder started",
            workers=workers,
            lake=str(self._settings.lake),
        )

    async def _keep_house(self, lake: Lake) -> None:
        """Compact past hours and days, and delete old days.

        It begins a while after the start, so that files of a killed recorder are on disk by then.
        """
        ending = threading.Event()
        try:
            await asyncio.sleep(HOUSEKEEPING_AFTER_S)
            while True:
                try:
                    await asyncio.to_thread(self._tidy, lake, ending)
                except (LakeError, OSError) as error:
                    log.warning("cannot tidy up the history; retrying later", extra={"why": str(error)})
                await asyncio.sleep(HOUSEKEEPING_EVERY_S)
        finally:
            ending.set()

    def _tidy(self, lake: Lake, ending: threading.Event) -> None:
        done = compact(lake, stopped=ending.is_set)
        for name in done.set_aside:
            log.warning("unreadable file of the history set aside", extra={"file": name})
        if self._settings.keep_days is None or ending.is_set():
            return
        dropped = expire(lake, self._settings.keep_days).dropped_days
        if dropped:
            log.info("old history deleted", extra={"days": ",".join(dropped)})

    def _changed(self, change: Change) -> None:
        if isinstance(change, LeaseAcquired):
            self._acquired.set()
        else:
            self._acquired.clear()
