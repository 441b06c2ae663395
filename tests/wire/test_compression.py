import bz2
import gzip
import lzma
import tracemalloc
import zlib
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.wire import strategies
from umbel.errors import BadMessage, BadValue, TooLarge, WireError
from umbel.wire.compression import COMPRESSIONS, compress, decompress
from umbel.wire.message import Limits


@given(st.binary(max_size=200), st.sampled_from(["gzip", "zlib", "bzip2", "lzma", "application/x-bz2"]))
@strategies.quick
def test_what_was_packed_is_unpacked(data: bytes, name: str) -> None:
    mime, packed = compress(data, name)
    assert decompress(packed, mime) == data


def test_gzip_is_a_zlib_stream() -> None:  # wire 1.5, trap 23
    mime, packed = compress(b"x" * 100, "gzip")
    assert mime == "application/x-gzip"
    assert packed[:2] == b"\x78\x9c"


def test_a_real_gzip_file_is_read_all_the_same() -> None:
    assert decompress(gzip.compress(b"hello"), "application/x-gzip") == b"hello"


@pytest.mark.parametrize("mime", COMPRESSIONS)
def test_a_bomb_is_unpacked_no_further_than_the_limit(mime: str) -> None:
    limits = Limits(size_max_bytes=1000)
    assert decompress(COMPRESSIONS[mime].pack(b"0" * 1000), mime, limits=limits) == b"0" * 1000
    bomb = COMPRESSIONS[mime].pack(b"0" * 30_000_000)
    tracemalloc.start()
    with pytest.raises(TooLarge, match="unpack to more than the limit of 1000"):
        decompress(bomb, mime, limits=limits)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 15_000_000  # the window of lzma alone takes 8 MiB


def test_a_stream_that_asks_for_too_much_memory_is_refused() -> None:
    filters = [{"id": lzma.FILTER_LZMA2, "dict_size": 256 * 1024 * 1024}]
    greedy = lzma.LZMACompressor(filters=filters)
    # Compressing this way would need gigabytes here too; the header alone is enough to ask.
    with pytest.raises(BadMessage, match="cannot be decompressed as 'lzma'"):
        decompress(greedy.compress(b"x") + greedy.flush(), "lzma")


@pytest.mark.parametrize("name", ["zstd", "brotli", "application/zstd", "application/x-brotli"])
def test_compressions_we_do_not_have_are_refused_by_name(name: str) -> None:
    with pytest.raises(BadValue, match=f"compression '{name}' needs a library"):
        compress(b"", name)
    with pytest.raises(BadMessage, match=f"compression '{name}' needs a library"):
        decompress(b"", name)


def test_an_unknown_compression_is_refused_by_name() -> None:
    with pytest.raises(BadMessage, match="compression 'snappy' is unknown"):
        decompress(b"", "snappy")


@pytest.mark.parametrize(
    ("packed", "name"),
    [(zlib.compress(b"x" * 99), "zlib"), (bz2.compress(b"x"), "bz2"), (lzma.compress(b"x"), "xz")],
)
def test_a_stream_that_ends_too_early_is_refused(packed: bytes, name: str) -> None:
    with pytest.raises(BadMessage, match="ends too early"):
        decompress(packed[:-6], name)


@given(st.binary(max_size=60), st.sampled_from(sorted(COMPRESSIONS)))
@strategies.quick
def test_any_bytes_are_unpacked_or_refused(data: bytes, mime: str) -> None:
    with suppress(WireError):
        decompress(data, mime)
