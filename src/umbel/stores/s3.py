"""A lake under a prefix of an S3 bucket, by Arrow's file system; and leases, because S3 has no locks.

Nothing is renamed. An object exists, whole, when its put is answered; a multipart upload exists when its last
request names all parts. So a process that dies in between leaves nothing that a list shows, only parts that a
lifecycle rule of the bucket removes. Large files are written to a temporary file first, so that a local
failure cannot complete a partial upload.

Endpoint, region and credentials come from the usual variables and files (AWS_ENDPOINT_URL, AWS_REGION,
AWS_ACCESS_KEY_ID, AWS_PROFILE and so on). The client retries failed requests; when it gives up, the error is
Unavailable.

Leases: a process that wants to hold a name writes a lease object under a unique name, and lists all leases of
that name. If its lease is the only one, it holds the name. Otherwise it removes its lease and retries a
little later, a few times. Two processes cannot both be alone: both have written before they list, so the
later list shows the other lease. This needs lists that show every earlier put, which S3 guarantees.

A lease is renewed while its holder runs. A lease that was not renewed for LEASE_S has expired, and the next
process that wants the name removes it. All times come from the store's lists, so clocks need not agree. A
holder that was paused for longer finds its lease missing when it confirms it, which it does before it
publishes. Between that check and the publication nothing protects the name: a holder that pauses there may
publish after its lease has expired.
"""

import mmap
import os
import secrets
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from umbel.stores.interface import HeldByAnother, Unavailable, refusal

# ---- leases ----------------------------------------------------------------------------------------

LEASE_S = 60.0
RENEW_S = 10.0
LEASE_TRIES = 3
LEASE_WAIT_S = 0.5


def rivals(own: str, changed_at: Mapping[str, float], lease_s: float) -> tuple[list[str], list[str]]:
    """Split the leases of other processes in a list into valid ones and expired ones."""
    now = changed_at[own]
    others = sorted(name for name in changed_at if name != own)
    living = [name for name in others if changed_at[name] > now - lease_s]
    return living, [name for name in others if name not in living]


class Lease:
    """A context that holds a lease and renews it in a thread; raises HeldByAnother if another process holds
    it.
    """

    def __init__(self, store: "S3Store", folder: str, owner: str) -> None:
        self._store = store
        self._folder = folder
        self._owner = owner.encode()
        self._name = f"{folder}/{os.getpid()}-{secrets.token_hex(8)}"
        self._renewed_at = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="umbel-lease", daemon=True)

    def __enter__(self) -> "Lease":
        tries = 1
        while (holder := self._tried()) is not None and tries < LEASE_TRIES:
            time.sleep(LEASE_WAIT_S * (0.5 + secrets.randbelow(1000) / 1000))
            tries += 1
        if holder is None:
            self._thread.start()
            return self
        raise HeldByAnother(f"{holder} (if it died, its lease ends within {LEASE_S:g} s)")

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self._take_back()

    def confirm(self) -> None:
        """Raise Unavailable if another process may hold the name now."""
        is_late = time.monotonic() - self._renewed_at > LEASE_S - RENEW_S
        if is_late or self._name not in self._store.changed_at(self._folder):
            raise Unavailable(
                self._store.where,
                f"the lease on {self._folder} was not renewed for {LEASE_S:g} s and is lost; try again",
            )

    def _tried(self) -> str | None:
        """Write a lease; return None if it is the only valid one, otherwise the owner of another."""
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
            return  # the lease expires by itself

    def _renew(self) -> None:
        while not self._over.wait(RENEW_S):
            try:
                if self._name not in self._store.changed_at(self._folder):
                    return  # it had expired, and another process removed it
                self._put()
            except OSError:
                continue  # the store may answer again before the lease expires


# ---- s3 --------------------------------------------------------------------------------------------

ATTEMPTS = 5
"""Attempts of the client for each request, at growing intervals of some seconds in total."""

CONNECT_S, REQUEST_S = 5.0, 20.0
READS, READ_AGAIN_S = 3, 0.5
TOGETHER = 8
"""Parallel requests for many files."""

T = TypeVar("T")


class S3Store:
    """A store under a prefix of a bucket."""

    def __init__(self, where: str) -> None:
        """Open the store. `where` is `s3://bucket/prefix`, without credentials."""
        self.where = where.rstrip("/")
        self._base = self.where.removeprefix("s3://")
        self._leases: dict[str, Lease] = {}

    # -- what is there ---------------------------------------------------------------------------

    def path(self, _name: str) -> Path | None:
        """Return None: files on S3 have no path."""
        return None

    def is_there(self) -> bool:
        """Return whether any object has the prefix."""
        return bool(self._listed("", recursive=False))

    def names(self, folder: str, *, hidden: bool = False) -> list[str]:
        """Return all objects below the folder, sorted."""
        found = (self._name(entry.path) for entry in self._listed(folder) if entry.is_file)
        return sorted(name for name in found if hidden or not _is_hidden(name.removeprefix(folder)))

    def folders(self, folder: str) -> list[str]:
        """Return the names of the folders directly in this one."""
        return sorted(entry.base_name for entry in self._listed(folder, recursive=False) if not entry.is_file)

    def sizes(self, names: Sequence[str]) -> list[int]:
        """Return the sizes in bytes, from lists of the top folders; 0 for a missing object."""
        tops = {name.partition("/")[0] for name in names}
        known = {
            self._name(entry.path): entry.size for top in tops for entry in self._listed(top) if entry.is_file
        }
        return [known.get(name) or 0 for name in names]

    def read(self, name: str, *, at_most: int | None = None) -> bytes:
        """Return the content, or its first bytes."""
        return bytes(self.buffer(name, at_most).to_pybytes())

    def buffer(self, name: str, at_most: int | None = None) -> Any:
        """Return the content in memory; a failed read is retried a few times."""
        for left in reversed(
            range(READS)
        ):  # the client treats an error reply that is longer than the file as the end of the file
            try:
                with self._answered(), self._files.open_input_file(self._key(name)) as file:
                    return file.read_buffer(at_most)
            except Unavailable:
                if not left:
                    raise
            time.sleep(READ_AGAIN_S)
        return None

    def open(self, name: str) -> Any:
        """Return an Arrow file that reads the object in parts."""
        with self._answered():
            return self._files.open_input_file(self._key(name))

    def dataset(self, names: Sequence[str], schema: Callable[[], Any] | None = None) -> Any:
        """Return an Arrow dataset of these Parquet files."""
        from pyarrow import dataset

        with self._answered():
            keys = [self._key(name) for name in names]
            wanted = schema() if schema is not None else None
            return dataset.dataset(keys, wanted, format="parquet", filesystem=self._files)

    # -- what is written -------------------------------------------------------------------------

    def put(self, name: str, data: bytes | mmap.mmap) -> None:
        """Write the whole object."""
        with self._answered():
            stream = self._files.open_output_stream(self._key(name))
            stream.write(data)
            stream.close()

    def writer(self, name: str) -> Any:
        """Return a stream whose object appears when it is closed."""
        with self._answered():
            return self._files.open_output_stream(self._key(name))

    def draft(self, _name: str) -> "S3Draft":
        """Return a temporary file that is uploaded when it is published."""
        return S3Draft(self)

    def clear_drafts(self, _folder: str, _prefix: str) -> None:
        """Do nothing: drafts are temporary files, which end with their process."""

    def move(self, name: str, target: str) -> None:
        """Copy the object, then delete it."""
        with self._answered():
            self._files.copy_file(self._key(name), self._key(target))
        self.remove(name)

    def delete(self, names: Iterable[str]) -> None:
        """Delete the objects, several at a time."""
        self._each(self.remove, names)

    def remove(self, name: str) -> None:
        """Delete one object, which may be missing."""
        with self._answered(), suppress(FileNotFoundError):
            self._files.delete_file(self._key(name))

    def delete_folder(self, folder: str) -> None:
        """Delete all objects below the folder."""
        with self._answered(), suppress(FileNotFoundError):
            self._files.delete_dir(self._key(folder))

    # -- locks -----------------------------------------------------------------------------------

    @contextmanager
    def held(self, name: str, owner: str) -> Iterator[None]:
        """Hold a lease on this name; raise HeldByAnother if another process holds one."""
        with Lease(self, name, owner) as lease:
            self._leases[name] = lease
            try:
                yield
            finally:
                del self._leases[name]

    def confirm(self, name: str) -> None:
        """Raise Unavailable if the lease on this name may be lost."""
        if name in self._leases:
            self._leases[name].confirm()

    def changed_at(self, folder: str) -> dict[str, float]:
        """Return when each object was written, by the clock of S3."""
        return {
            self._name(entry.path): entry.mtime.timestamp() for entry in self._listed(folder) if entry.is_file
        }

    # -- by Arrow --------------------------------------------------------------------------------

    @property
    def _files(self) -> Any:
        return _file_system()

    def _key(self, name: str) -> str:
        return f"{self._base}/{name}" if name else self._base

    def _name(self, key: str) -> str:
        return key.removeprefix(self._base).removeprefix("/")

    def _listed(self, folder: str, *, recursive: bool = True) -> list[Any]:
        from pyarrow.fs import FileSelector

        with self._answered():
            try:
                found: list[Any] = self._files.get_file_info(
                    FileSelector(self._key(folder), recursive=recursive)
                )
            except FileNotFoundError:
                return []
        return found

    def _each(self, work: Callable[[str], T], names: Iterable[str]) -> list[T]:
        with ThreadPoolExecutor(TOGETHER) as threads:
            return list(threads.map(work, names))

    @contextmanager
    def _answered(self) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise
        except OSError as error:
            raise refusal(self.where, error) from None


class S3Draft:
    """A temporary file, which ends with its process unless it is uploaded."""

    def __init__(self, store: S3Store) -> None:
        import pyarrow as pa

        self._store = store
        self._file = tempfile.TemporaryFile(prefix="umbel-")  # noqa: SIM115
        self.sink: Any = pa.PythonFile(self._file, "w")

    def written(self) -> Any:
        """Return the file, mapped into memory, for Arrow to read from."""
        import pyarrow as pa

        return pa.BufferReader(pa.py_buffer(self._mapped()))

    def publish(self, name: str) -> None:
        """Upload the file as an object of this name."""
        self._store.put(name, self._mapped())
        self.forget()

    def forget(self) -> None:
        """Delete the temporary file."""
        self._file.close()

    def _mapped(self) -> mmap.mmap:
        self._file.flush()
        return mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)


@cache
def _file_system() -> Any:
    from pyarrow import fs

    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    chosen: dict[str, Any] = {}
    if endpoint:
        parts = urlsplit(endpoint)
        chosen = {"scheme": parts.scheme, "endpoint_override": parts.netloc}
    return fs.S3FileSystem(
        **chosen,
        connect_timeout=CONNECT_S,
        request_timeout=REQUEST_S,
        retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=ATTEMPTS),
        allow_delayed_open=True,  # one request for a small object, not three
    )


def _is_hidden(name: str) -> bool:
    return any(part.startswith(".") for part in name.split("/"))
