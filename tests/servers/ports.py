"""Free ports for the servers of the tests.

Below 32768, where Linux begins to number outgoing connections: a port that the kernel hands out may
be taken by somebody's connection before the server has it.
"""

import random
import socket
from itertools import islice

PORTS = range(10_000, 32_000)
TRIES_MAX = 1_000


def free_port() -> int:
    """A port of 127.0.0.1 on which nothing listens."""
    return free_ports(1)[0]


def free_ports(number: int) -> list[int]:
    """As many ports, all different."""
    tried = random.sample(PORTS, TRIES_MAX)
    found = list(islice(filter(_is_free, tried), number))
    assert len(found) == number, f"of {TRIES_MAX} ports only {len(found)} are free"
    return found


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
