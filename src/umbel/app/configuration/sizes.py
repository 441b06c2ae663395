"""Sizes of memory as people write them: `200000` is in KiB, as Celery has it; `200MB` says its unit."""

import re

from umbel.errors import BadSetting

_UNITS = {"": 1024, "b": 1, "kb": 1000, "mb": 1000**2, "gb": 1000**3}
_UNITS |= {"k": 1024, "m": 1024**2, "g": 1024**3, "kib": 1024, "mib": 1024**2, "gib": 1024**3}


def size_bytes(name: str, size: int | str | None, *, source: str = "the settings") -> int | None:
    """The bytes that the setting `name` stands for; None when it is not set."""
    if size is None:
        return None
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", str(size).lower())
    if found is None or found[2] not in _UNITS or not float(found[1]):
        problem = "must be a size: a number of KiB, or a number with its unit, such as 200MB or 1.5GiB"
        raise BadSetting(name, size, problem, source=source)
    return int(float(found[1]) * _UNITS[found[2]])
