"""What goes on while the demo stays: enough for every page, and no more than the machine hardly feels."""

from collections import Counter

from umbel.demo.load import SWELL, gentle

BATCH_MAX = 20


def test_gentle_load_has_every_kind_and_stays_gentle() -> None:
    batches = [list(gentle(number)) for number in range(SWELL)]
    names = Counter(call.task.rpartition(".")[2] for batch in batches for call in batch)
    assert names.keys() == {"quick", "slow", "awaited", "retried", "failing", "delayed"}
    assert names["failing"] < names["quick"] / 3, "most of it succeeds"
    sizes = [len(batch) for batch in batches]
    assert max(sizes) <= BATCH_MAX and min(sizes) < BATCH_MAX / 4, "it swells and ebbs"
    assert sum(call.args[0] for batch in batches for call in batch if call.task.endswith("slow")) < 2 * SWELL
