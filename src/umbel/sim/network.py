"""Network: broadcasts to every node and calls to the store, in the weather of the moment.

Each message has a separate delay, so messages overtake one another; in bad weather it is
lost, comes twice, or comes very late. A node that is cut off sends and hears nothing, as behind a
broken link to the broker: what is broadcast meanwhile is gone for it.

What is not modelled: a broker that keeps broadcasts for a node that is away (RabbitMQ does so for
some seconds). Such a broker only loses less.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from umbel.sim.world import World

NEAR_S = (0.0005, 0.005)  # the delay of a message in fair weather
FAR_S = (4.0, 4.0, 4.0, 15.0)  # how late a delayed message can come


@dataclass(slots=True)
class Weather:
    """The shares of messages that are lost, doubled and delayed, and who is cut off."""

    lost: float = 0.0
    doubled: float = 0.0
    delayed: float = 0.0
    cut_off: set[int] = field(default_factory=set)

    @property
    def fair(self) -> bool:
        return not (self.lost or self.doubled or self.delayed)


class Listener(Protocol):
    index: int

    def hear(self, message: Any) -> None: ...


class Network:
    """`broadcasts` and `calls` have separate weather: a store can work while a fanout does not."""

    def __init__(self, world: World) -> None:
        self.broadcasts = Weather()
        self.calls = Weather()
        self.sent = 0
        self.delivered = 0
        self._world = world

    def clear_up(self) -> None:
        self.broadcasts = Weather()
        self.calls = Weather()

    def broadcast(self, sender: int, message: Any, listeners: Iterable[Listener]) -> None:
        """Send to all, the sender too. `sender` is -1 for a client, which is never cut off."""
        self.sent += 1
        weather = self.broadcasts
        if sender in weather.cut_off:
            return
        world = self._world
        random = world.random.random
        low, high = NEAR_S
        span = high - low
        if weather.fair and not weather.cut_off:
            for listener in listeners:
                self.delivered += 1
                world.after(low + span * random(), listener.hear, message)
            return
        for listener in listeners:
            if listener.index not in weather.cut_off:
                self._send(weather, listener.hear, message)

    def call(self, node: int, arrive: Callable[..., None], *arguments: Any) -> None:
        """One way of a call to the store, or of its reply."""
        weather = self.calls
        if node in weather.cut_off:
            return
        if weather.fair:
            low, high = NEAR_S
            self._world.after(low + (high - low) * self._world.random.random(), arrive, *arguments)
        else:
            self._send(weather, arrive, *arguments)

    def _send(self, weather: Weather, arrive: Callable[..., None], *arguments: Any) -> None:
        chance = self._world.random
        if chance.random() < weather.lost:
            return
        copies = 2 if chance.random() < weather.doubled else 1
        for _ in range(copies):
            self.delivered += 1
            late = chance.random() < weather.delayed
            delay_s = chance.uniform(0.0, chance.choice(FAR_S)) if late else chance.uniform(*NEAR_S)
            self._world.after(delay_s, arrive, *arguments)
