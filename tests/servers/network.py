"""A network of namespaces whose parts can be cut off, so that nobody is told: packets vanish on the way.

Each place is a network namespace behind a router of its own; this process is reached through it at
`Network.here`. A cut place keeps its addresses and connections, and the router drops what goes to it
and comes from it, as a firewall or a broken switch does.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

PREFIX = f"ut{os.getpid() % 100_000}"
SUBNET = f"10.{200 + os.getpid() % 50}"


def missing() -> str:
    """Why no network can be made here; "" if one can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None or shutil.which("sysctl") is None:
        return "`ip` or `sysctl` is missing (iproute2, procps)"
    probe = f"{PREFIX}probe"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True, check=False)
    if made.returncode:
        return f"the kernel makes no network namespaces: {made.stderr.strip()}"
    _ip("netns", "del", probe)
    return ""


class Network:
    def __init__(self, places: Sequence[str]) -> None:
        self.here = f"{SUBNET}.0.2"
        self._router = f"{PREFIX}router"
        self._addresses = {place: f"{SUBNET}.{number}.2" for number, place in enumerate(places, 1)}

    def inside(self, place: str) -> list[str]:
        """What a command begins with that runs there."""
        return ["ip", "netns", "exec", f"{PREFIX}{place}"]

    def cut(self, place: str) -> None:
        address = self._addresses[place]
        _ip("-n", self._router, "route", "add", "blackhole", f"{address}/32")
        _ip("-n", self._router, "rule", "add", "from", address, "blackhole")

    def heal(self, place: str) -> None:
        address = self._addresses[place]
        _ip("-n", self._router, "rule", "del", "from", address, "blackhole")
        _ip("-n", self._router, "route", "del", "blackhole", f"{address}/32")

    def make(self) -> None:
        _ip("netns", "add", self._router)
        subprocess.run(
            ["ip", "netns", "exec", self._router, "sysctl", "-qw", "net.ipv4.ip_forward=1"], check=True
        )
        self._connect("", f"{SUBNET}.0")
        _ip("route", "add", f"{SUBNET}.0.0/16", "via", f"{SUBNET}.0.1")
        for number, place in enumerate(self._addresses, 1):
            _ip("netns", "add", f"{PREFIX}{place}")
            _ip("-n", f"{PREFIX}{place}", "link", "set", "lo", "up")
            self._connect(place, f"{SUBNET}.{number}")
            _ip("-n", f"{PREFIX}{place}", "route", "add", "default", "via", f"{SUBNET}.{number}.1")

    def remove(self) -> None:
        for place in (*self._addresses, "router"):
            subprocess.run(["ip", "netns", "del", f"{PREFIX}{place}"], capture_output=True, check=False)
        subprocess.run(["ip", "link", "del", f"{PREFIX}h"], capture_output=True, check=False)

    def _connect(self, place: str, subnet: str) -> None:
        """A cable from the place, or from here, to the router."""
        near, far = f"{PREFIX}{place or 'h'}"[:15], f"{PREFIX}{place or 'h'}r"[:15]
        where = ["-n", f"{PREFIX}{place}"] if place else []
        _ip("link", "add", near, "type", "veth", "peer", "name", far)
        if place:
            _ip("link", "set", near, "netns", f"{PREFIX}{place}")
        _ip("link", "set", far, "netns", self._router)
        _ip(*where, "addr", "add", f"{subnet}.2/24", "dev", near)
        _ip(*where, "link", "set", near, "up")
        _ip("-n", self._router, "addr", "add", f"{subnet}.1/24", "dev", far)
        _ip("-n", self._router, "link", "set", far, "up")


@contextmanager
def network(*places: str) -> Iterator[Network]:
    made = Network(places)
    try:
        made.make()
        yield made
    finally:
        made.remove()


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)
