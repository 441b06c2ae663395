"""Sessions: how long they last, and who can push out whom."""

import asyncio

import pytest

from tests.web.test_visitors import judged, logged_in, scope, sent_back, token, visitors_of
from umbel.web import credentials
from umbel.web import visitors as visitors_module
from umbel.web.actions import AuditEntry
from umbel.web.credentials import SESSION_S, Session, Sessions, make_token
from umbel.web.settings import Role, WebSettings

IDLE_S = 1800.0


def session(holder: str, role: Role = Role.VIEWER, *, ends_at: float = SESSION_S) -> Session:
    return Session(name=holder, role=role, holder=holder, ends_at=ends_at)


def test_a_session_ends_when_nobody_works_with_it() -> None:
    sessions_here = Sessions(IDLE_S)
    number = sessions_here.begin(session("ann"), 0.0)
    assert sessions_here.find(number, IDLE_S - 1, is_used=True) is not None
    assert sessions_here.find(number, 2 * IDLE_S - 2, is_used=False) is not None  # the page asked by itself
    assert sessions_here.find(number, 2 * IDLE_S - 1, is_used=True) is None
    assert (
        sessions_here.find(number, 1.0, is_used=True) is None and len(sessions_here) == 0
    )  # it does not come back


def test_a_session_that_is_used_ends_after_its_time() -> None:
    sessions_here = Sessions(IDLE_S)
    number = sessions_here.begin(session("ann"), 0.0)
    for now in range(0, int(SESSION_S), 1000):
        assert sessions_here.find(number, now, is_used=True) is not None
    assert sessions_here.find(number, SESSION_S, is_used=True) is None


def test_a_flood_of_viewers_pushes_out_no_admin_and_no_other_viewer() -> None:
    sessions_here = Sessions(IDLE_S)
    admin = sessions_here.begin(session("root", Role.ADMIN), 0.0)
    bob = sessions_here.begin(session("bob"), 0.0)
    flood = [sessions_here.begin(session("ann"), 1.0) for _ in range(3 * credentials.ROOM_MAX)]
    assert sessions_here.find(admin, 2.0, is_used=True) is not None
    assert sessions_here.find(bob, 2.0, is_used=True) is not None
    assert len(sessions_here) == 2 + credentials.OF_HOLDER_MAX
    assert sessions_here.find(flood[-1], 2.0, is_used=True) is not None
    assert sessions_here.find(flood[0], 2.0, is_used=True) is None


def test_many_viewers_push_out_viewers_alone() -> None:
    sessions_here = Sessions(IDLE_S)
    admin, first = (
        sessions_here.begin(session("root", Role.ADMIN), 0.0),
        sessions_here.begin(session("first"), 0.0),
    )
    for number in range(credentials.ROOM_MAX):
        sessions_here.begin(session(f"viewer {number}"), 1.0)
    assert sessions_here.find(admin, 2.0, is_used=True) is not None
    assert sessions_here.find(first, 2.0, is_used=True) is None
    assert len(sessions_here) == 1 + credentials.ROOM_MAX


def test_what_a_page_asks_for_by_itself_keeps_no_session(monkeypatch: pytest.MonkeyPatch) -> None:
    given, now = make_token(), [1000.0]
    monkeypatch.setattr(visitors_module, "time", lambda: now[0])
    live = [("x-umbel-live", "1")]
    for path, headers, lasts in (("/", [], True), ("/", live, False), (credentials.STREAM, [], False)):
        visitors = visitors_of(WebSettings(session_idle_s=IDLE_S), lambda: [token(given)])
        cookie = sent_back(logged_in(visitors, given))
        found = []
        for _ in range(3):
            now[0] += 0.5 * IDLE_S
            found.append(asyncio.run(visitors.judge({**scope(cookie, *headers), "path": path})))
        assert (found[-1] is not None) is lasts, path


def test_logging_in_again_ends_the_session_that_the_browser_had() -> None:
    given = make_token()
    visitors = visitors_of(WebSettings(), lambda: [token(given)])
    first = sent_back(logged_in(visitors, given))
    second = sent_back(logged_in(visitors, given, first))
    assert judged(visitors, first) is None and judged(visitors, second) is not None
    assert len(visitors.sessions) == 1


def test_a_person_can_end_all_of_their_sessions() -> None:
    given, other, noted = make_token(), make_token(), list[AuditEntry]()
    visitors = visitors_of(WebSettings(), lambda: [token(given), token(other)], noted)
    mine = [sent_back(logged_in(visitors, given)) for _ in range(3)]
    theirs = sent_back(logged_in(visitors, other))
    assert len(visitors.sessions_of(scope(mine[0]))) == 3
    removed = asyncio.run(visitors.log_out(scope(mine[1]), everywhere=True))
    assert "Max-Age=0" in removed
    assert [judged(visitors, cookie) for cookie in mine] == [None] * 3
    assert judged(visitors, theirs) is not None and visitors.sessions_of(scope(mine[0])) == []
    assert (noted[-1].action, noted[-1].arguments) == ("logout", {"other_sessions": 2})
