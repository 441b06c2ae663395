"""What a relay leaves in the data of its lease, for `umbel outbox status` and for the next relay."""

import msgspec


class Progress(msgspec.Struct, frozen=True):
    """Of one outbox, since its lease was first held. `at`: Unix time of the last message; 0: none yet."""

    published: int = 0
    at: float = 0.0

    def and_more(self, count: int, at: float) -> "Progress":
        return Progress(self.published + count, at) if count else self


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Progress).decode


def encode_progress(progress: Progress) -> bytes:
    return _encode(progress)


def decode_progress(data: bytes) -> Progress:
    """Nothing where nothing was left, or what nobody can read."""
    try:
        return _decode(data)
    except msgspec.DecodeError:
        return Progress()
