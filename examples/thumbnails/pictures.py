"""Pictures with nothing but the standard library: read PPM, shrink, write PNG."""

import re
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

PPM_HEADER = re.compile(rb"P6\s+(\d+)\s+(\d+)\s+255\s")  # files with comments are not read


@dataclass(frozen=True)
class Picture:
    width: int
    height: int
    pixels: bytes  # red, green, blue; row by row

    def __post_init__(self) -> None:
        if len(self.pixels) != 3 * self.width * self.height:
            raise ValueError(f"{len(self.pixels)} bytes are not {self.width} x {self.height} pixels")


def read_ppm(path: Path) -> Picture:
    data = path.read_bytes()
    header = PPM_HEADER.match(data)
    if header is None:
        raise ValueError(f"{path} is not a binary PPM with 8 bits a channel")
    return Picture(int(header[1]), int(header[2]), data[header.end() :])


def write_ppm(picture: Picture, path: Path) -> None:
    path.write_bytes(b"P6 %d %d 255\n" % (picture.width, picture.height) + picture.pixels)


def shrink(picture: Picture, width: int) -> Picture:
    """Average squares of pixels. The result is the nearest size that whole squares give."""
    side = max(1, picture.width // width)
    columns, rows = picture.width // side, picture.height // side
    pixels = bytes(
        _average(picture, column * side, row * side, side, channel)
        for row in range(rows)
        for column in range(columns)
        for channel in range(3)
    )
    return Picture(columns, rows, pixels)


def _average(picture: Picture, left: int, top: int, side: int, channel: int) -> int:
    starts = (3 * ((top + down) * picture.width + left) + channel for down in range(side))
    return sum(sum(picture.pixels[start : start + 3 * side : 3]) for start in starts) // side**2


def encode_png(picture: Picture) -> bytes:
    stride = 3 * picture.width
    rows = (picture.pixels[start : start + stride] for start in range(0, len(picture.pixels), stride))
    header = struct.pack(">IIBBBBB", picture.width, picture.height, 8, 2, 0, 0, 0)  # 8 bits, RGB
    unfiltered = b"".join(b"\0" + row for row in rows)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(unfiltered)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in chunks)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
