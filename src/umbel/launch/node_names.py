"""The name of a node, from what the command line says."""

import socket

from umbel.errors import BadSetting
from umbel.wire.limits import is_name


def node_name(given: str | None) -> str:
    """`name@host`; a bare name gets this host, nothing gives `umbel@host`."""
    host = socket.gethostname()
    name = (given or "umbel").replace("%h", host).replace("%n", host.partition(".")[0])
    name = name.replace("%d", host.partition(".")[2])
    whole = name if "@" in name else f"{name}@{host}"
    before, _, after = whole.partition("@")
    if not before or not after or " " in whole or not whole.isprintable() or not is_name(whole):
        raise BadSetting("--hostname", given, "write it as name@host", source="the command line")
    return whole
