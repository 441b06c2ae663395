"""A client that retries what failed, by a filter, and may kill itself meanwhile.

    python retrying_client.py BROKER_URL NAME SECONDS

It kills itself while it sends, if it takes so many seconds to send one; 0: it does not.
"""

import asyncio
import os
import random
import signal
import sys
from collections.abc import Sequence
from threading import Timer

from umbel.brokers.interface import BrokerSettings, Resend, Resent
from umbel.brokers.registry import open_broker
from umbel.control.failures import FailureFilter, find_failed, retry_failed


async def retry_all(url: str, name: str, letter_s: float) -> None:
    broker = open_broker(BrokerSettings(url))
    await broker.open()
    resend = broker.resend

    async def dying(letters: Sequence[Resend]) -> Resent:
        if letter_s:
            delay_s = random.random() * letter_s * len(letters)
            Timer(delay_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
        return await resend(letters)

    broker.resend = dying  # type: ignore[method-assign]
    found = await find_failed(broker, FailureFilter(name=name))
    print(len(found), flush=True)
    done = await retry_failed(broker, found)
    assert not done.refused, done.refused
    await broker.close()


if __name__ == "__main__":
    asyncio.run(retry_all(sys.argv[1], sys.argv[2], float(sys.argv[3])))
    os._exit(0)  # the timer is not waited for
