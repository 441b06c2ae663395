"""S3: a lake under a prefix of a bucket, by Arrow's file system.

Nothing is renamed. An object is there when its put is answered, whole; one that is written in parts is
there when the last request names them all. So a process that dies in between leaves nothing that a list
shows, only parts that a lifecycle rule of the bucket removes. Large files are written to a temporary file
first, so that a failure of ours never ends an upload that is half done.

Endpoint, region and credentials are those of the usual variables and files (AWS_ENDPOINT_URL, AWS_REGION,
AWS_ACCESS_KEY_ID, AWS_PROFILE and so on). What fails is tried again by the client; what it gives up is
Unavailable.
"""

import mmap
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from umbel.stores.interface import Unavailable
from umbel.stores.leases import Lease
from umbel.stores.refusals import refusal

ATTEMPTS = 5
"""Of each request, by the client, with growing waits of up to some seconds in all."""

CONNECT_S, REQUEST_S = 5.0, 20.0
READS, READ_AGAIN_S = 3, 0.5
TOGETHER = 8
"""Requests at a time where many files are concerned."""

T = TypeVar("T")


class S3Store:
    def __init__(self, where: str) -> None:
        """`s3://bucket/prefix`, without credentials."""
        self.where = where.rstrip("/")
        self._base = self.where.removeprefix("s3://")
        self._leases: dict[str, Lease] = {}

    # -- what is there ---------------------------------------------------------------------------

    def path(self, _name: str) -> Path | None:
        return None

    def is_there(self) -> bool:
        return bool(self._listed("", recursive=False))

    def names(self, folder: str, *, hidden: bool = False) -> list[str]:
        found = (self._name(one.path) for one in self._listed(folder) if one.is_file)
        return sorted(name for name in found if hidden or not _is_hidden(name.removeprefix(folder)))

    def folders(self, folder: str) -> list[str]:
        return sorted(one.base_name for one in self._listed(folder, recursive=False) if not one.is_file)

    def sizes(self, names: Sequence[str]) -> list[int]:
        tops = {name.partition("/")[0] for name in names}
        known = {self._name(one.path): one.size for top in tops for one in self._listed(top) if one.is_file}
        return [known.get(name) or 0 for name in names]

    def read(self, name: str, *, at_most: int | None = None) -> bytes:
        return bytes(self.buffer(name, at_most).to_pybytes())

    def buffer(self, name: str, at_most: int | None = None) -> Any:
        for left in reversed(range(READS)):  # the client takes a refusal longer than the file for its end
            try:
                with self._answered(), self._files.open_input_file(self._key(name)) as file:
                    return file.read_buffer(at_most)
            except Unavailable:
                if not left:
                    raise
            time.sleep(READ_AGAIN_S)
        return None

    def open(self, name: str) -> Any:
        with self._answered():
            return self._files.open_input_file(self._key(name))

    def dataset(self, names: Sequence[str], schema: Callable[[], Any] | None = None) -> Any:
        from pyarrow import dataset

        with self._answered():
            keys = [self._key(name) for name in names]
            wanted = schema() if schema is not None else None
            return dataset.dataset(keys, wanted, format="parquet", filesystem=self._files)

    # -- what is written -------------------------------------------------------------------------

    def put(self, name: str, data: bytes | mmap.mmap) -> None:
        with self._answered():
            stream = self._files.open_output_stream(self._key(name))
            stream.write(data)
            stream.close()

    def writer(self, name: str) -> Any:
        with self._answered():
            return self._files.open_output_stream(self._key(name))

    def draft(self, _name: str) -> "S3Draft":
        return S3Draft(self)

    def clear_drafts(self, _folder: str, _prefix: str) -> None:
        """Drafts are temporary files, which end with their process."""

    def move(self, name: str, target: str) -> None:
        with self._answered():
            self._files.copy_file(self._key(name), self._key(target))
        self.remove(name)

    def delete(self, names: Iterable[str]) -> None:
        self._each(self.remove, names)

    def remove(self, name: str) -> None:
        with self._answered(), suppress(FileNotFoundError):
            self._files.delete_file(self._key(name))

    def delete_folder(self, folder: str) -> None:
        with self._answered(), suppress(FileNotFoundError):
            self._files.delete_dir(self._key(folder))

    # -- who is at work --------------------------------------------------------------------------

    @contextmanager
    def held(self, name: str, owner: str) -> Iterator[None]:
        with Lease(self, name, owner) as lease:
            self._leases[name] = lease
            try:
                yield
            finally:
                del self._leases[name]

    def confirm(self, name: str) -> None:
        if name in self._leases:
            self._leases[name].confirm()

    def changed_at(self, folder: str) -> dict[str, float]:
        """When each file was put, by the clock of S3."""
        return {self._name(one.path): one.mtime.timestamp() for one in self._listed(folder) if one.is_file}

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
    """A temporary file, which ends with its process, until it is put."""

    def __init__(self, store: S3Store) -> None:
        import pyarrow as pa

        self._store = store
        self._file = tempfile.TemporaryFile(prefix="umbel-")  # noqa: SIM115
        self.sink: Any = pa.PythonFile(self._file, "w")

    def written(self) -> Any:
        import pyarrow as pa

        return pa.BufferReader(pa.py_buffer(self._mapped()))

    def publish(self, name: str) -> None:
        self._store.put(name, self._mapped())
        self.forget()

    def forget(self) -> None:
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
