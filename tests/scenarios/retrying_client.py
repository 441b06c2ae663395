"""A client that retries what failed, by a filter, and may kill itself meanwhile.

    python retrying_client.py BROKER_URL NAME SECONDS

It kills itself within so many seconds after it began to send; 0: not at all.
"""

import asyncio
import os
import random
import signal
import sys
from threading import Timer

from umbel.brokers.interface import BrokerSettings
from umbel.brokers.registry import open_broker
from umbel.coordination.failures import Wanted, find_failed, retry_failed


async def retry_all(url: str, name: str, spread_s: float) -> None:
    broker = open_broker(BrokerSettings(url))
    await broker.open()
    found = await find_failed(broker, Wanted(name=name))
    print(len(found), flush=True)
    if spread_s:
        delay_s = random.random() * spread_s
        Timer(delay_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
    done = await retry_failed(broker, found)
    assert not done.refused, done.refused
    await broker.close()


if __name__ == "__main__":
    asyncio.run(retry_all(sys.argv[1], sys.argv[2], float(sys.argv[3])))
    os._exit(0)  # the timer is not waited for
