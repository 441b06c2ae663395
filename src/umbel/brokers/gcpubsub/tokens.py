"""Tokens: who we are, for Google; an emulator does not ask.

Google's own library finds the credentials as everywhere: GOOGLE_APPLICATION_CREDENTIALS, `gcloud auth
application-default login`, or the account of the machine. Asking for a token blocks, so an event loop asks
in a thread.
"""

import threading
from typing import Any

from umbel.brokers.gcpubsub.address import Address
from umbel.errors import AccessRefused, BrokerUnavailable

SCOPE = "https://www.googleapis.com/auth/pubsub"


class Tokens:
    def __init__(self, address: Address) -> None:
        self._address = address
        self._credentials: Any = None
        self._lock = threading.Lock()

    @property
    def known(self) -> str | None:
        """A token that is good for a while; None: it must be asked for. "": none is needed."""
        if self._address.is_emulator or not self._address.tls:
            return ""
        credentials = self._credentials
        return str(credentials.token) if credentials is not None and credentials.valid else None

    def after_fork(self) -> None:
        self._lock = threading.Lock()

    def fetch(self) -> str:
        """Blocks."""
        from google.auth import default
        from google.auth.exceptions import DefaultCredentialsError, GoogleAuthError, TransportError
        from google.auth.transport.requests import Request

        with self._lock:
            try:
                if self._credentials is None:
                    self._credentials, _ = default(scopes=[SCOPE])
                if not self._credentials.valid:
                    self._credentials.refresh(Request())
            except DefaultCredentialsError as error:
                raise AccessRefused(f"no credentials for Pub/Sub: {error}") from None
            except TransportError as error:
                raise BrokerUnavailable(f"cannot get a token for Pub/Sub: {error}") from None
            except GoogleAuthError as error:
                raise AccessRefused(f"Google does not accept the credentials for Pub/Sub: {error}") from None
            return str(self._credentials.token)
