"""A network of namespaces whose parts can be cut off, so that nobody is told: packets vanish on the way.

Each place is a network namespace with one device, a TUN, and this process is reached from it at
`Network.here`. A thread of this process is the link between them: it reads every packet, and passes it on,
late, or not at all, as the place's `Weather` says. Kernels without netem can do that too. A place that is cut
off keeps its address and its connections, as behind a firewall or a broken switch.
"""

import fcntl
import os
import select
import shutil
import struct
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from heapq import heappop, heappush
from random import Random
from time import monotonic

PREFIX = f"ut{os.getpid() % 100_000}"
SUBNET = f"10.{200 + os.getpid() // 250 % 50}.{os.getpid() % 250}"  # not that of another run
TUN = "/dev/net/tun"
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
PACKET_MAX = 65_536
WAITING_MAX = 20_000  # packets under way; more are dropped, as a full queue does
LOOK_S = 0.5  # how often the link looks whether it is to end


@dataclass(frozen=True, slots=True)
class Weather:
    """What becomes of packets of a place. `loss` is a share of them, in both directions."""

    out_cut: bool = False
    in_cut: bool = False
    delay_s: float = 0.0
    jitter_s: float = 0.0
    loss: float = 0.0


CLEAR = Weather()
CUT = Weather(out_cut=True, in_cut=True)


def missing() -> str:
    """Why no network can be made here; "" if one can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "`ip` is missing (iproute2)"
    if not os.access(TUN, os.R_OK | os.W_OK):
        return f"{TUN} is missing, so that there is no userspace link"
    probe = f"{PREFIX}probe"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True, check=False)
    if made.returncode:
        return f"the kernel makes no network namespaces: {made.stderr.strip()}"
    _ip("netns", "del", probe)
    return ""


class Network:
    def __init__(self, places: Sequence[str]) -> None:
        self.here = f"{SUBNET}.1"
        self.between = 0  # packets from one place to another: none, where all talk through a server here
        self.dropped = 0
        self._addresses = {place: f"{SUBNET}.{number}" for number, place in enumerate(places, 2)}
        self._weather = dict.fromkeys(places, CLEAR)
        self._devices: dict[str, int] = {}  # by place, "" is here
        self._chance = Random()
        self._waiting: list[tuple[float, int, int, bytes]] = []
        self._passed = 0
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._pass_on, daemon=True)

    def inside(self, place: str) -> list[str]:
        """What a command begins with that runs there."""
        return ["ip", "netns", "exec", f"{PREFIX}{place}"]

    def set_weather(self, place: str, weather: Weather) -> None:
        self._weather[place] = weather

    def cut(self, place: str) -> None:
        self.set_weather(place, CUT)

    def heal(self, place: str) -> None:
        self.set_weather(place, CLEAR)

    def make(self) -> None:
        self._add_device("", self.here)
        for place, address in self._addresses.items():
            _ip("netns", "add", f"{PREFIX}{place}")
            _ip("-n", f"{PREFIX}{place}", "link", "set", "lo", "up")
            self._add_device(place, address)
        self._thread.start()

    def remove(self) -> None:
        self._ends.set()
        if self._thread.is_alive():
            self._thread.join()
        for device in self._devices.values():
            os.close(device)
        for place in self._addresses:
            subprocess.run(["ip", "netns", "del", f"{PREFIX}{place}"], capture_output=True, check=False)

    def _add_device(self, place: str, address: str) -> None:
        """The file stays with the device when that moves to its namespace."""
        name = f"{PREFIX}{place or 'h'}"[:15]
        device = os.open(TUN, os.O_RDWR | os.O_NONBLOCK)
        self._devices[place] = device
        fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH", name.encode(), IFF_TUN | IFF_NO_PI))
        where = ["-n", f"{PREFIX}{place}"] if place else []
        if place:
            _ip("link", "set", name, "netns", f"{PREFIX}{place}")
        _ip(*where, "addr", "add", f"{address}/24", "dev", name)
        _ip(*where, "link", "set", name, "up")

    # ---- the link ----------------------------------------------------------------------------------

    def _pass_on(self) -> None:
        """Until the end: take packets from every device, and deliver those whose time has come."""
        places = {device: place for place, device in self._devices.items()}
        by_address = {bytes(map(int, one.split("."))): place for place, one in self._addresses.items()}
        by_address[bytes(map(int, self.here.split(".")))] = ""
        poll = select.epoll()
        for device in places:
            poll.register(device, select.EPOLLIN)
        while not self._ends.is_set():
            wait_s = max(0.0, min(LOOK_S, self._waiting[0][0] - monotonic())) if self._waiting else LOOK_S
            for device, _ in poll.poll(wait_s):
                with suppress(BlockingIOError):
                    self._take(places[device], os.read(device, PACKET_MAX), by_address)
            while self._waiting and self._waiting[0][0] <= monotonic():
                _, _, device, packet = heappop(self._waiting)
                with suppress(OSError):  # the device is not up, or full
                    os.write(device, packet)
        poll.close()

    def _take(self, source: str, packet: bytes, by_address: dict[bytes, str]) -> None:
        target = by_address.get(packet[16:20])
        if packet[0] >> 4 != 4 or target is None or target == source:  # IPv6 looks for routers
            return
        self.between += bool(source and target)
        leaving = self._weather[source] if source else CLEAR
        arriving = self._weather[target] if target else CLEAR
        lost = leaving.out_cut or arriving.in_cut or self._is_lost(leaving) or self._is_lost(arriving)
        if lost or len(self._waiting) >= WAITING_MAX:
            self.dropped += 1
            return
        due = monotonic() + self._delay_s(leaving) + self._delay_s(arriving)
        self._passed += 1
        heappush(self._waiting, (due, self._passed, self._devices[target], packet))

    def _is_lost(self, weather: Weather) -> bool:
        return weather.loss > 0 and self._chance.random() < weather.loss

    def _delay_s(self, weather: Weather) -> float:
        return weather.delay_s + (self._chance.uniform(0.0, weather.jitter_s) if weather.jitter_s else 0.0)


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
