"""How a periodic task is tested: `pip install pytest`, then `pytest` in this folder."""

from datetime import UTC, datetime
from pathlib import Path

import pytest

import sales
import tasks
from umbel.testing import Clock, Inbox


def test_the_report_is_due_at_half_past_two_in_vienna_in_winter_and_in_summer(
    umbel_inbox: Inbox, umbel_clock: Clock
) -> None:
    umbel_clock.set(datetime(2026, 3, 28, 1, 29, tzinfo=UTC))  # the clocks go forward a day later
    umbel_clock.advance(60)
    umbel_inbox.assert_sent_once(tasks.report_sales)
    umbel_clock.advance_to(datetime(2026, 3, 30, 0, 30, tzinfo=UTC))
    assert len(umbel_inbox.of(tasks.report_sales)) == 3


@pytest.mark.usefixtures("umbel_eager")
def test_a_report_adds_up_a_days_sales(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "HERE", tmp_path)
    monkeypatch.setattr(tasks, "REPORTS", tmp_path / "reports")
    for module in (tasks, sales):
        monkeypatch.setattr(module, "SALES", tmp_path / "sales.db")
    sales.main()
    written = tasks.report_sales.delay("2026-03-07").get()
    assert "Together 1880.10" in (tmp_path / written).read_text()
