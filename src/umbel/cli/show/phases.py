"""How far a worker has come in stopping, in a few words for `umbel status` and `umbel health`."""

from collections.abc import Mapping
from typing import Any


def phase_text(found: Mapping[str, Any]) -> str:
    """ "draining, 3 running, 12 s left"; "running" for a worker that is not stopping."""
    phase = str(found.get("phase", ""))
    if phase in ("", "running"):
        return phase
    left_s = found.get("left_s")
    left = f", {left_s:.0f} s left" if isinstance(left_s, int | float) else ""
    return f"{phase}, {found.get('running', 0)} running{left}"
