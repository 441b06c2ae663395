"""Digest: 64 bits that tell one event from another, the same for everybody who heard it.

It is taken over the canonical event: its record written as JSON with sorted keys, without what is
null and without what receivers add. So a missing field and a null one are the same, and so are
two times within one microsecond. The number is signed, as the pipeline's tables hold it.

An event is digested only when that decides something: when everything before it in the order is
equal, or when events are counted and there is more than one. The chance that two of a million
different events share a digest is about one in forty million.
"""

from hashlib import blake2b
from typing import Any

import msgspec

from umbel.events.types import Event

_DIGEST_BYTES = 8
_NOT_DIGESTED = frozenset({"timestamp", "extra", "subject", "told_type"})


def eid(event: Event) -> int:
    digest = blake2b(_to_json(canonical(event)), digest_size=_DIGEST_BYTES).digest()
    return int.from_bytes(digest, "big", signed=True)


def canonical(event: Event) -> dict[str, Any]:
    """The event as a map of the wire, with its time in microseconds."""
    fields = dict(event.extra or {})
    for name in event.__struct_fields__:
        value = getattr(event, name)
        if value is not None and name not in _NOT_DIGESTED:
            fields[name] = value
    return {**fields, "type": event.type_name, "timestamp": event.at_us}


_to_json = msgspec.json.Encoder(order="deterministic", enc_hook=str).encode
