"""What the benchmark of the async client calls sound."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.fastapi_client import TIMEOUT_S, as_text, judged


def site(**changes: Any) -> dict[str, Any]:
    quiet = {"longest_s": 0.02, "longest_own_s": 0.01, "median_s": 0.001, "broken": 0}
    return {"acknowledged": ["a", "b"], "raised": {}, "raised_longest_s": 0.0, **quiet, **changes}


def test_every_acknowledged_send_ran_and_nothing_ran_twice(tmp_path: Path) -> None:
    (tmp_path / "1.txt").write_text("a\nb\n")
    found = judged(site(raised={"SendUnknown": 3}, raised_longest_s=TIMEOUT_S), site(), tmp_path)
    assert found["sound"]
    assert (found["requests"], found["raised_but_ran"]) == (5, 0)
    assert as_text({"rate": 500.0, **found}).endswith("as promised")


@pytest.mark.parametrize(
    ("subject", "ledger"),
    [
        (site(), "a\nb\nb\n"),
        (site(raised={"SendUnknown": 1}, raised_longest_s=TIMEOUT_S + 1), "a\nb\n"),
        (site(broken=1), "a\nb\n"),
        (site(longest_own_s=0.07), "a\nb\n"),
    ],
    ids=["twice", "late", "no answer", "blocked"],
)
def test_what_is_not_as_promised_is_said(subject: dict[str, Any], ledger: str, tmp_path: Path) -> None:
    (tmp_path / "1.txt").write_text(ledger)
    found = judged(subject, site(), tmp_path)
    assert not found["sound"]
    assert "NOT as promised" in as_text({"rate": 500.0, **found})
