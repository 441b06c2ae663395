"""Memory: what a recorder must know after a restart, kept in the lake beside its files.

It is written after each file and before that file's events are acknowledged. A recorder that dies in
between reads those events again and comes to the same conclusions, so it need not be exact; without
it nothing is lost but the sight of gaps that span the restart.
"""

from pathlib import Path

import msgspec

from umbel.errors import LakeError
from umbel.events.sequences import Known
from umbel.history.lake import Lake, write_file


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


def memory_path(lake: Lake, name: str) -> Path:
    return lake.recorders / f"{name}.json"


def read_memory(lake: Lake, name: str) -> Memory | None:
    path = memory_path(lake, name)
    try:
        return msgspec.json.decode(path.read_bytes(), type=Memory)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as error:
        raise LakeError(
            f"cannot read {path}: {error}; move the file away, and the recorder starts a new one"
        ) from None


def write_memory(lake: Lake, memory: Memory) -> None:
    lake.make_folder(lake.recorders)
    write_file(memory_path(lake, memory.name), msgspec.json.encode(memory))


def all_memories(lake: Lake) -> list[Memory]:
    found = [read_memory(lake, path.stem) for path in sorted(lake.recorders.glob("[!.]*.json"))]
    return [memory for memory in found if memory is not None]
