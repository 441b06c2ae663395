"""Leases: one holder at a time in a store that has neither locks nor conditional writes.

Who wants to hold a name puts a lease beside those of others, under a unique name, and lists them.
Alone, it holds. Otherwise it takes its lease back and tries again a little later, a few times. Two cannot
both find themselves alone: both have put before they list, so that the one who lists later sees the
other. This rests on lists that show every put that was answered before, which S3 promises.

A lease is renewed while its holder lives. One that was not renewed for LEASE_S is over, and is removed by
the next who comes. All times are the store's, as it shows them in a list, so that clocks need not agree.
A holder that was stopped for longer finds its lease gone when it confirms it, which it does before it
publishes. Between that look and the publication nothing guards it: there time, and not the store,
keeps two apart.
"""

import os
import secrets
import threading
import time
from collections.abc import Mapping
from typing import Protocol

from umbel.stores.interface import Held, Unavailable

LEASE_S = 60.0
RENEW_S = 10.0
TRIES = 3
WAIT_S = 0.5


class LeasedStore(Protocol):
    where: str

    def read(self, name: str) -> bytes: ...
    def put(self, name: str, data: bytes) -> None: ...
    def changed_at(self, folder: str) -> dict[str, float]: ...
    def remove(self, name: str) -> None: ...


def rivals(own: str, changed_at: Mapping[str, float], lease_s: float) -> tuple[list[str], list[str]]:
    """Of the leases that a list shows with their times, those of others that live, and that are over."""
    now = changed_at[own]
    others = sorted(name for name in changed_at if name != own)
    living = [name for name in others if changed_at[name] > now - lease_s]
    return living, [name for name in others if name not in living]


class Lease:
    """Take it as a context; the lease is given back at the end."""

    def __init__(self, store: LeasedStore, folder: str, owner: str) -> None:
        self._store = store
        self._folder = folder
        self._owner = owner.encode()
        self._name = f"{folder}/{os.getpid()}-{secrets.token_hex(8)}"
        self._renewed_at = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="umbel-lease", daemon=True)

    def __enter__(self) -> "Lease":
        tries = 1
        while (holder := self._tried()) is not None and tries < TRIES:
            time.sleep(WAIT_S * (0.5 + secrets.randbelow(1000) / 1000))
            tries += 1
        if holder is None:
            self._thread.start()
            return self
        raise Held(f"{holder} (if it died, its lease ends within {LEASE_S:g} s)")

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self._take_back()

    def confirm(self) -> None:
        """Raise if it may be somebody else's by now."""
        is_late = time.monotonic() - self._renewed_at > LEASE_S - RENEW_S
        if is_late or self._name not in self._store.changed_at(self._folder):
            raise Unavailable(
                self._store.where,
                f"the lease on {self._folder} was not renewed for {LEASE_S:g} s and is lost; try again",
            )

    def _tried(self) -> str | None:
        """None if it is held now, else by whom it is."""
        try:
            self._put()
            living, over = rivals(self._name, self._store.changed_at(self._folder), LEASE_S)
            for name in over:
                self._store.remove(name)
            if not living:
                return None
            holder = self._owner_of(living[0])
        except BaseException:
            self._take_back()
            raise
        self._take_back()
        return holder

    def _owner_of(self, name: str) -> str:
        try:
            return self._store.read(name).decode(errors="replace")[:200]
        except FileNotFoundError:
            return "another process"

    def _put(self) -> None:
        started = time.monotonic()
        self._store.put(self._name, self._owner)
        self._renewed_at = started

    def _take_back(self) -> None:
        try:
            self._store.remove(self._name)
        except OSError:
            return  # it ends by itself

    def _renew(self) -> None:
        while not self._over.wait(RENEW_S):
            try:
                if self._name not in self._store.changed_at(self._folder):
                    return  # it was over, and somebody else's turn
                self._put()
            except OSError:
                continue  # the store may answer again before the lease ends
