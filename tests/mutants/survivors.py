"""Survivors: mutants that no test can or need kill, and why, as `survivors.txt` says.

Four lines each: the module and the operator, the line after a "-", the changed line after a "+", why.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path

from tests.mutants.mutations import Mutant

SURVIVORS = Path(__file__).parent / "survivors.txt"
Place = tuple[str, str, str]  # the operator, the line, the changed line
Explained = Mapping[str, Mapping[Place, str]]  # by module


def read(file: Path) -> Explained:
    found: dict[str, dict[Place, str]] = {}
    text = "\n".join(line for line in file.read_text().splitlines() if not line.startswith("#"))
    for stanza in text.strip().split("\n\n"):
        if stanza:
            title, before, after, *why = (part.strip() for part in stanza.strip().splitlines())
            module, operator = title.split(": ")
            assert before[0] == "-" and after[0] == "+", f"{title}: a line and a changed line are wanted"
            assert why, f"{title}: it says {after}, but not why that may survive"
            found.setdefault(module, {})[operator, before[1:].strip(), after[1:].strip()] = " ".join(why)
    return found


def explained_by(known: Mapping[Place, str], mutant: Mutant) -> Place | None:
    place = mutant.operator, mutant.before, mutant.after
    return place if place in known else None


def stale(known: Mapping[Place, str], mutants: Iterable[Mutant]) -> list[Place]:
    """What is explained and cannot be made of the source any more."""
    made = {explained_by(known, mutant) for mutant in mutants}
    return [place for place in known if place not in made]
