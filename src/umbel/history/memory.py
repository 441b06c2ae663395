"""Memory: what a recorder must know after a restart, kept in the lake beside its files.

It is written after each file and before that file's events are acknowledged. A recorder that dies in
between reads those events again and comes to the same conclusions, so it need not be exact; without
it nothing is lost but the sight of gaps that span the restart.
"""

import msgspec

from umbel.errors import LakeError
from umbel.events.sequences import Known
from umbel.history.lake import RECORDERS, Lake


class Memory(msgspec.Struct):
    """Counts are since the recorder of this name first ran here."""

    name: str
    began_us: int = 0  # when it was registered with the broker
    updated_at: float = 0.0
    acknowledged: int = 0
    files: int = 0
    events: int = 0
    size_bytes: int = 0
    gaps: int = 0
    missing: int = 0  # events in those gaps
    lost: int = 0  # events that the broker's log dropped at its limit before they were read
    lost_told: int = 0  # the broker's count that is accounted for
    unreadable: int = 0
    deaf_s: float = 0.0  # since when no recorder heard Celery's workers
    starts: int = 0
    senders: list[Known] = []


def read_memory(lake: Lake, name: str) -> Memory | None:
    try:
        return msgspec.json.decode(lake.store.read(_file_of(name)), type=Memory)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as error:
        raise LakeError(
            f"cannot read {lake.store.where}/{_file_of(name)}: {error}; move the file away, and the recorder"
            " starts a new one"
        ) from None


def write_memory(lake: Lake, memory: Memory) -> None:
    lake.store.put(_file_of(memory.name), msgspec.json.encode(memory))


def all_memories(lake: Lake) -> list[Memory]:
    names = [name.removeprefix(f"{RECORDERS}/") for name in lake.store.names(RECORDERS)]
    stems = [name.removesuffix(".json") for name in names if name.endswith(".json") and "/" not in name]
    return [memory for stem in stems if (memory := read_memory(lake, stem)) is not None]


def _file_of(name: str) -> str:
    return f"{RECORDERS}/{name}.json"
