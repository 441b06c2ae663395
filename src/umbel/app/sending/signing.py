"""Signing: whether a message is sent with a signature, and with which one.

Trust is inherited. What an unsigned message causes is unsigned too: its callbacks and errbacks, the next step
of its chain, the body of a chord that it completes, its retries, its replacement, and everything that its
task sends while it runs, also from other threads. Otherwise anyone who may write to one queue could choose
what runs on every other queue. An unsigned message names the task that sent it, so a refusal shows where the
message came from.

A signature is bound to the cluster. A message for an outbox gets no binding, because the broker may be
unreachable inside the transaction: the relay adds it. Eager mode signs nothing, because it sends nothing.
"""

from typing import TYPE_CHECKING

from umbel.app.request import CURRENT_REQUEST, Request, unsigned_run
from umbel.app.settings import Settings
from umbel.app.waiting import patiently
from umbel.brokers.interface import BrokerSettings
from umbel.brokers.registry import open_producer
from umbel.clock import cluster_now
from umbel.errors import NoClusterId
from umbel.outbox import OPEN, open_block
from umbel.protocol.delivery.trust import UNSIGNED, ClusterId
from umbel.text import without_password
from umbel.wire.message import Outgoing
from umbel.wire.signing import Keyring, Signer, marked_unsigned, signer_of

if TYPE_CHECKING:
    from umbel.app.app import App


def signed(
    app: "App",
    keyring: Keyring,
    outgoing: Outgoing,
    sender: Request | None = None,
    *,
    is_canonical: bool = False,
) -> Outgoing:
    """The message with its signature, or marked as unsigned if its sender is not trusted."""
    sender = sender or CURRENT_REQUEST.get() or unsigned_run()
    signs_for = None if sender is None else sender.signs_for
    if signs_for == UNSIGNED:
        assert sender is not None, "only a task can be untrusted"
        return marked_unsigned(outgoing, sender.id)
    if OPEN.get() is not None and open_block(app) is not None:
        return keyring.sign_row(outgoing, cluster_now())
    signer = app.signing_cluster.signer() if signs_for is None else signer_of(keyring, signs_for)
    if signer is None:
        return outgoing
    return signer.sign_task(outgoing, cluster_now(), is_canonical=is_canonical)


def is_trusted() -> bool:
    """Whether messages that this code sends may be signed: no unsigned message caused it to run."""
    sender = CURRENT_REQUEST.get() or unsigned_run()
    return sender is None or sender.signs_for != UNSIGNED


class SigningCluster:
    """The cluster that this process signs for: the setting `signing_cluster`, else the id of the broker."""

    def __init__(self, app: "App") -> None:
        self._app = app
        self._broker_id = ""
        self._settings: Settings | None = None  # from which the signer was made
        self._signer: Signer | None = None

    def is_unknown(self) -> bool:
        """Whether the broker must be asked for its id before anything can be signed."""
        settings = self._app.settings
        return settings.keyring is not None and not (settings.signing_cluster or self._broker_id)

    def learn(self, cluster: str) -> None:
        """Use this id of the broker from now on."""
        if cluster != self._broker_id:
            self._broker_id, self._settings = cluster, None

    def signer(self) -> Signer | None:
        """The signer for this cluster; None without keys or in eager mode. Asks the broker for its id once.

        NoClusterId: the broker has no id.
        """
        settings = self._app.settings
        if self._settings is settings:
            return self._signer
        keyring = settings.keyring
        if keyring is None:
            return None
        if self.is_unknown():
            if self._app.eager_backend is not None:
                return None
            found = patiently(self._app.producer.cluster_id, settings.publish_timeout_s)
            if found is None:
                raise NoClusterId.at(without_password(settings.broker))
            self._broker_id = found.id
        self._signer = signer_of(keyring, settings.signing_cluster or self._broker_id)
        self._settings = settings
        return self._signer


def read_cluster_id(settings: BrokerSettings) -> ClusterId | None:
    """Ask the broker for its id, over a separate connection. Blocks."""
    producer = open_producer(settings)
    try:
        return producer.cluster_id()
    finally:
        producer.close()
