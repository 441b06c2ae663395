"""ConfiguredBroker: what every broker is told, by its settings and by who listens to it."""

from collections.abc import Callable

from umbel.brokers.interface import BrokerSettings, Replaced
from umbel.brokers.links import unheard
from umbel.protocol.outage import LinkChange
from umbel.wire.signing import Keyring


class ConfiguredBroker:
    def __init__(self, settings: BrokerSettings) -> None:
        self._settings = settings
        self._on_link: Callable[[LinkChange], None] = unheard
        self._on_replaced: Callable[[Replaced], None] = lambda _: None

    @property
    def url(self) -> str:
        return self._settings.url

    @property
    def keyring(self) -> Keyring | None:
        return self._settings.keyring

    def on_link(self, callback: Callable[[LinkChange], None]) -> None:
        self._on_link = callback

    def on_replaced(self, callback: Callable[[Replaced], None]) -> None:
        self._on_replaced = callback

    def _tell_link(self, change: LinkChange) -> None:
        self._on_link(change)

    def _tell_replaced(self, replaced: Replaced) -> None:
        self._on_replaced(replaced)
