"""Facts: what a recorder records about its work, as events among the events.

recorder-online, recorder-offline   when it recorded; `unheard_since`: from then on no
                                    recorder heard Celery's workers
recorder-gap                        numbers `first` to `last` of that node's events did not come
recorder-lost                       `lost` events fell out of the log before they were read; `why`
recorder-deaf                       the broker was away from `since` on; events of Celery's workers
                                    from that time may be lost
recorder-unreadable                 `count` entries are no events; they lie in `file`
"""

import os
import socket
from time import time
from typing import Any

from umbel.events.sequences import Gap

ONLINE, OFFLINE = "recorder-online", "recorder-offline"
GAP, LOST, DEAF, UNREADABLE = "recorder-gap", "recorder-lost", "recorder-deaf", "recorder-unreadable"

Fact = dict[str, Any]


class FactMaker:
    """Signs them with the recorder's name and this run of it."""

    def __init__(self, recorder: str, boot: int) -> None:
        self._recorder = recorder
        self._boot = boot

    def make(self, type_name: str, **fields: Any) -> Fact:
        return {
            "type": type_name,
            "hostname": f"{self._recorder}@{socket.gethostname()}",
            "pid": os.getpid(),
            "timestamp": time(),
            "inc": self._boot,
            "recorder": self._recorder,
            **fields,
        }

    def gap(self, gap: Gap) -> Fact:
        """The same whenever it is reported: a recorder that was killed reports it again."""
        return {
            "type": GAP,
            "hostname": gap.hostname,
            "pid": gap.pid,
            "inc": gap.inc,
            "timestamp": gap.at_us / 1_000_000,
            "recorder": self._recorder,
            "first": gap.first,
            "last": gap.last,
        }
