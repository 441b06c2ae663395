"""Survivors: mutants that no test can or need kill, and why, as `survivors.txt` says.

Three lines each: the module and the operator, the changed line, the reason.
"""

from collections.abc import Mapping
from pathlib import Path

from tests.mutants.mutations import Mutant

SURVIVORS = Path(__file__).parent / "survivors.txt"
Place = tuple[str, str]  # the operator, the changed line
Explained = Mapping[str, Mapping[Place, str]]  # by module


def read(file: Path) -> Explained:
    found: dict[str, dict[Place, str]] = {}
    text = "\n".join(line for line in file.read_text().splitlines() if not line.startswith("#"))
    for stanza in text.strip().split("\n\n"):
        if stanza:
            title, line, *why = (part.strip() for part in stanza.strip().splitlines())
            module, operator = title.split(": ")
            assert why, f"{title}: it says {line}, but not why that may survive"
            found.setdefault(module, {})[operator, line] = " ".join(why)
    return found


def explained_by(known: Mapping[Place, str], mutant: Mutant) -> Place | None:
    place = mutant.operator, mutant.after
    return place if place in known else None
