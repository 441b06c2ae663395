"""Saved views: kept, replaced, deleted and bounded; by who may, and written down."""

import asyncio
from pathlib import Path
from sqlite3 import OperationalError
from typing import Any
from unittest.mock import ANY

import msgspec
import pytest

from tests.web.test_answers import ANN, site_in
from umbel.monitor.records import TaskFilter
from umbel.web import journal
from umbel.web.actions import COLUMNS, NAME_MAX, USUAL, VIEW_BYTES_MAX, DeleteView, SavedView, SaveView
from umbel.web.dashboard import Dashboard
from umbel.web.http import Forbidden, Refused, Visitor
from umbel.web.journal import Journal
from umbel.web.pages.tasks import address_of, columns_of
from umbel.web.settings import Role

VIEWER = Visitor(name="vic", role=Role.VIEWER, csrf="", address="10.0.0.7")
LATE = SaveView(view="late", match=TaskFilter(state="FAILURE", since=5.0), order="time", columns=["error"])
NAMES = (
    "<script>alert(1)</script>",
    "ünïcode \u202e",
    "x" * NAME_MAX,
    "a/b?c&d=e",
)


async def names(site: Dashboard) -> list[str]:
    return [one.name for one in await site.views()]


def test_a_view_is_saved_replaced_listed_and_deleted_and_all_of_it_audited(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with site_in(tmp_path) as site:
            assert (await site.act(ANN, LATE)).done
            assert (await site.act(ANN, msgspec.structs.replace(LATE, order="clock"))).done
            await site.act(ANN, SaveView(view="Apples"))
            [first, second] = await site.views()
            assert first == SavedView(name="Apples", saved_at=ANY)
            assert second == SavedView(name="late", match=LATE.match, columns=["error"], saved_at=ANY)
            assert (await site.act(ANN, DeleteView(view="late"))).count == 1
            gone = await site.act(ANN, DeleteView(view="late"))
            assert not gone.done and gone.refused == {"late": "there is no such view"}
            assert await names(site) == ["Apples"]
            audit = [(one.action, one.target, one.status) for one in await site.audit.entries()]
            assert audit[-1] == ("save_view", "late", "done")
            assert audit[:2] == [("delete_view", "late", "failed"), ("delete_view", "late", "done")]

    asyncio.run(scenario())


def test_who_only_looks_saves_and_deletes_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with site_in(tmp_path) as site:
            await site.act(ANN, LATE)
            for action in (SaveView(view="mine"), DeleteView(view="late")):
                with pytest.raises(Forbidden, match="operator"):
                    await site.act(VIEWER, action)
            assert await names(site) == ["late"]
            assert [one.status for one in await site.audit.entries()] == ["refused", "refused", "done"]

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("action", "why"),
    [
        (SaveView(view=" \t"), "a view needs a name"),
        (SaveView(view="late\u3000ones"), "plain spaces"),
        (SaveView(view="x", match=TaskFilter(text="y" * VIEW_BYTES_MAX)), "4,000 at most"),
        (DeleteView(view="x", nodes=["w1"]), "leave out `nodes`"),
    ],
)
def test_a_view_without_a_name_or_too_large_is_refused(tmp_path: Path, action: Any, why: str) -> None:
    async def scenario() -> None:
        async with site_in(tmp_path) as site:
            with pytest.raises(Refused, match=why):
                await site.act(ANN, action)
            assert await site.views() == []

    asyncio.run(scenario())


def test_there_are_so_many_views_and_one_of_them_can_still_be_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "VIEWS_MAX", 2)

    async def scenario() -> None:
        async with site_in(tmp_path) as site:
            for one in "ab":
                assert (await site.act(ANN, SaveView(view=one))).done
            full = await site.act(ANN, SaveView(view="c"))
            assert not full.done and "delete some first" in full.problem
            assert (await site.act(ANN, SaveView(view="a", order="time"))).done
            assert [(one.name, one.order) for one in await site.views()] == [("a", "time"), ("b", "clock")]

    asyncio.run(scenario())


def test_views_are_there_after_a_restart_and_damaged_ones_are_passed_over(tmp_path: Path) -> None:
    file = tmp_path / "web.db"
    first = Journal(file)
    views = [SavedView(name=one, match=TaskFilter(text=one)) for one in NAMES]
    for one in views:
        assert first.save_view(one)
    first._file.execute("INSERT INTO views VALUES ('torn', '{')")
    first.close()
    again = Journal(file)
    assert sorted(again.views(), key=lambda one: NAMES.index(one.name)) == views
    again.close()


def test_the_file_that_cannot_be_written_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_view: SavedView) -> bool:
        raise OperationalError("disk is full")

    async def scenario() -> None:
        async with site_in(tmp_path) as site:
            monkeypatch.setattr(site.journal, "save_view", broken)
            result = await site.act(ANN, LATE)
            assert not result.done and "disk is full" in result.problem

    asyncio.run(scenario())


def test_a_view_opens_at_an_address_that_says_all_of_it() -> None:
    view = SavedView(name="x", match=LATE.match, order="time", columns=["error", "at"])
    assert address_of(view) == {"state": "FAILURE", "since": 5.0, "order": "time", "columns": "error,at"}
    assert address_of(SavedView(name="x", columns=list(USUAL))) == {}
    assert columns_of(["clock,colour", "state"]) == ("state", "clock")
    assert columns_of([]) == columns_of(["colour"]) == USUAL
    assert columns_of(COLUMNS) == COLUMNS
