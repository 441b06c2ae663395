"""HTTP/1.1 as far as Pub/Sub's REST interface needs it: a request as bytes, an answer from bytes.

Pure: the blocking and the asynchronous link feed the same reader. An answer has a length or comes in
chunks; one with neither ends with the connection. An answer larger than ANSWER_MAX_BYTES is an error.
"""

import msgspec

from umbel.errors import BrokerUnavailable

HEAD_MAX_BYTES = 64 * 1024
ANSWER_MAX_BYTES = 64 * 2**20  # a pull of 10 MB, in base64, is 14 MB
_END = b"\r\n\r\n"


class Answer(msgspec.Struct, frozen=True, gc=False):
    status: int
    body: bytes
    keeps_open: bool  # the connection may be used again


def encode_request(verb: str, host: str, path: str, body: bytes, token: str = "") -> bytes:
    lines = [
        f"{verb} {path} HTTP/1.1",
        f"host: {host}",
        "accept: application/json",
        "content-type: application/json",
        f"content-length: {len(body)}",
    ]
    if token:
        lines.append(f"authorization: Bearer {token}")
    return "\r\n".join(lines).encode() + _END + body


class AnswerReader:
    """Feed it what arrives; it returns the answer when that is complete."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._head: tuple[int, dict[str, str]] | None = None
        self._chunks: list[bytes] = []

    @property
    def is_empty(self) -> bool:
        """Nothing has come yet."""
        return self._head is None and not self._data

    def feed(self, data: bytes) -> Answer | None:
        self._data += data
        if self._head is None:
            place = self._data.find(_END)
            if place < 0:
                if len(self._data) > HEAD_MAX_BYTES:
                    raise _strange("a head without an end")
                return None
            self._head = _read_head(bytes(self._data[:place]))
            del self._data[: place + len(_END)]
        if len(self._data) > ANSWER_MAX_BYTES:
            raise _strange(f"more than {ANSWER_MAX_BYTES} bytes")
        headers = self._head[1]
        if headers.get("transfer-encoding", "").lower() == "chunked":
            return self._done(b"".join(self._chunks)) if self._read_chunks() else None
        length = headers.get("content-length")
        if length is not None:
            wanted = _number(length, 10)
            return self._done(bytes(self._data[:wanted])) if len(self._data) >= wanted else None
        return None

    def end(self) -> Answer | None:
        """The connection has ended: an answer without a length is complete, another is cut off."""
        if self._head is None or {"content-length", "transfer-encoding"} & self._head[1].keys():
            return None
        return Answer(self._head[0], bytes(self._data), keeps_open=False)

    def _read_chunks(self) -> bool:
        while (place := self._data.find(b"\r\n")) >= 0:
            size = _number(bytes(self._data[:place]).split(b";")[0].decode("latin-1"), 16)
            ends = place + 2 + size + 2
            if len(self._data) < ends:
                return False
            if not size:
                return True
            self._chunks.append(bytes(self._data[place + 2 : ends - 2]))
            if sum(map(len, self._chunks)) > ANSWER_MAX_BYTES:
                raise _strange(f"more than {ANSWER_MAX_BYTES} bytes")
            del self._data[:ends]
        return False

    def _done(self, body: bytes) -> Answer:
        assert self._head is not None
        status, headers = self._head
        return Answer(status, body, keeps_open=headers.get("connection", "").lower() != "close")


def _read_head(head: bytes) -> tuple[int, dict[str, str]]:
    first, *lines = head.decode("latin-1").split("\r\n")
    version, _, rest = first.partition(" ")
    if not version.startswith("HTTP/1."):
        raise _strange(first[:80])
    pairs = (line.partition(":") for line in lines)
    return _number(rest[:3], 10), {name.strip().lower(): value.strip() for name, _, value in pairs}


def _number(text: str, base: int) -> int:
    try:
        number = int(text.strip(), base)
    except ValueError:
        number = -1
    if number < 0:
        raise _strange(text[:80])
    return number


def _strange(what: str) -> BrokerUnavailable:
    return BrokerUnavailable(f"the server does not answer as Pub/Sub does ({what!r}); check the address")
