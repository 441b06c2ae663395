"""Notifications to a service manager, if there is one (systemd, `Type=notify`): up, alive, stopping.

The address comes in `NOTIFY_SOCKET`. Nobody there is no failure: a worker runs as well without.
"""

import os
import socket
from contextlib import suppress


def tell_manager(*lines: str) -> bool:
    """Send lines such as READY=1; whether somebody could be told."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return False
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out:
        out.setblocking(False)
        out.sendto("\n".join(lines).encode(), address.replace("@", "\0", 1))
        return True
    return False
