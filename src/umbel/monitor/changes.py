"""Changes: what changed since somebody looked, by topic; the names of the newest, and how many in all."""

import msgspec

NAMES_MAX = 100


class Change(msgspec.Struct, frozen=True):
    """One topic: how many changes there were, and which names changed last."""

    count: int
    names: list[str]

    def joined(self, later: "Change") -> "Change":
        names = list(dict.fromkeys([*later.names, *self.names]))[:NAMES_MAX]
        return Change(self.count + later.count, names)


class Changes:
    """Cheap to note: an entry in a dict that never has more than a few hundred."""

    def __init__(self) -> None:
        self._topics: dict[str, dict[str, None]] = {}
        self._counts: dict[str, int] = {}

    def note(self, topic: str, name: str) -> None:
        self._counts[topic] = self._counts.get(topic, 0) + 1
        names = self._topics.setdefault(topic, {})
        names.pop(name, None)
        names[name] = None
        if len(names) > 2 * NAMES_MAX:
            self._topics[topic] = dict.fromkeys(list(names)[-NAMES_MAX:])

    def drain(self) -> dict[str, Change]:
        """What was noted since the last time, the newest names first."""
        topics, counts = self._topics, self._counts
        self._topics, self._counts = {}, {}
        return {
            topic: Change(counts[topic], list(reversed(names))[:NAMES_MAX]) for topic, names in topics.items()
        }
