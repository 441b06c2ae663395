"""Compression of message bodies, and decompression that does not trust the stated size.

A few kilobytes can decompress to gigabytes, so decompression stops at the size limit. The names are Celery's.
What Celery calls gzip is a zlib stream (wire 1.5, trap 23); both formats are read here.
"""

import bz2
import lzma
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from umbel.errors import BadMessage, BadValue, TooLarge
from umbel.wire.message import DEFAULT_LIMITS, Limits

# More than lzma's strongest preset needs; a stream can demand 4 GiB.
LZMA_MEMORY_MAX_BYTES = 128 * 1024 * 1024


class Unpacker(Protocol):
    """The common interface of the standard library's three decompressors."""

    @property
    def eof(self) -> bool:
        """Return whether the end of the compressed stream was read."""

    def decompress(self, data: bytes, max_length: int) -> bytes:
        """Return at most `max_length` bytes of the decompressed data."""


@dataclass(frozen=True, slots=True)
class Compression:
    """How to compress, and how to make a decompressor."""

    pack: Callable[[bytes], bytes]
    unpacker: Callable[[], Unpacker]


def compress(data: bytes, name: str) -> tuple[str, bytes]:
    """Return the MIME name for the header `compression`, and the compressed data. Raises BadValue."""
    mime = ALIASES.get(name, name)
    if mime not in COMPRESSIONS:
        raise BadValue(f"compression {name!r} {_why_not(mime)}")
    return mime, COMPRESSIONS[mime].pack(data)


def decompress(data: bytes, name: str, *, limits: Limits = DEFAULT_LIMITS) -> bytes:
    """Return the decompressed data, up to the size limit. Raises BadMessage or TooLarge."""
    mime = ALIASES.get(name, name)
    if mime not in COMPRESSIONS:
        raise BadMessage(f"compression {name!r} {_why_not(mime)}")
    unpacker = COMPRESSIONS[mime].unpacker()
    try:
        unpacked = unpacker.decompress(data, limits.size_max_bytes + 1)
    except (zlib.error, lzma.LZMAError, OSError, ValueError, EOFError) as error:
        raise BadMessage(f"the body of the message cannot be decompressed as {name!r}: {error}") from error
    if len(unpacked) > limits.size_max_bytes:
        raise TooLarge(
            f"{len(data)} bytes of {name!r} data unpack to more than the limit of {limits.size_max_bytes}"
        )
    if not unpacker.eof:
        raise BadMessage(f"the body of the message is incomplete: its {name!r} data ends too early")
    return unpacked


def _why_not(mime: str) -> str:
    if mime in NOT_BUILT_IN:
        return "needs a library that Umbel does not use; choose gzip, bzip2 or lzma"
    return "is unknown; choose gzip, bzip2 or lzma"


def _zlib_or_gzip() -> Unpacker:
    return zlib.decompressobj(wbits=zlib.MAX_WBITS | 32)


def _lzma() -> Unpacker:
    return lzma.LZMADecompressor(memlimit=LZMA_MEMORY_MAX_BYTES)


COMPRESSIONS = {
    "application/x-gzip": Compression(zlib.compress, _zlib_or_gzip),
    "application/x-bz2": Compression(bz2.compress, bz2.BZ2Decompressor),
    "application/x-lzma": Compression(lzma.compress, _lzma),
}

NOT_BUILT_IN = {"application/x-brotli", "application/zstd"}

ALIASES = {
    "gzip": "application/x-gzip",
    "zlib": "application/x-gzip",
    "bzip2": "application/x-bz2",
    "bzip": "application/x-bz2",
    "bz2": "application/x-bz2",
    "lzma": "application/x-lzma",
    "xz": "application/x-lzma",
    "brotli": "application/x-brotli",
    "zstd": "application/zstd",
    "zstandard": "application/zstd",
}
