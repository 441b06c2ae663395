"""What a lake needs of a folder and of S3, and what S3 does when it fails."""

import subprocess
import sys
import threading
from pathlib import Path

import pyarrow as pa
import pytest

from tests.servers.s3 import S3Server
from tests.waiting import wait_until
from umbel.stores import s3
from umbel.stores.interface import HeldByAnother, Store, Unavailable, raise_unavailable
from umbel.stores.local import store_at
from umbel.stores.s3 import rivals

LARGE = 12 * 1024 * 1024
"""More than Arrow puts by one request."""


@pytest.fixture(params=["folder", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "folder":
        return store_at(tmp_path / "lake")
    return store_at(request.getfixturevalue("s3_lake"))


def draft_of(store: Store, name: str, data: bytes) -> None:
    draft = store.draft(name)
    draft.sink.write(data)
    draft.publish(name)


def test_a_store_has_what_was_put_and_nothing_else(store: Store) -> None:
    assert (store.is_there(), store.names("a"), store.folders("a")) == (False, [], [])
    store.put("a/b/one", b"1")
    store.put("a/b/one", b"22")
    draft_of(store, "a/c/two", b"333")
    with store.writer("a/b/.three") as sink:
        sink.write(b"4444")
    assert store.is_there()
    assert store.names("a") == ["a/b/one", "a/c/two"]
    assert store.names("a", hidden=True) == ["a/b/.three", "a/b/one", "a/c/two"]
    assert store.folders("a") == ["b", "c"]
    assert store.sizes(["a/b/one", "a/nothing", "a/c/two"]) == [2, 0, 3]
    assert (store.read("a/b/one"), store.buffer("a/c/two").to_pybytes()) == (b"22", b"333")
    with store.open("a/c/two") as file:
        assert file.read() == b"333"
    for ask in (store.read, store.buffer, store.open):
        with pytest.raises(FileNotFoundError):
            ask("a/nothing")
    assert store_at(store.where).read("a/b/one") == b"22"


def test_a_draft_is_there_when_it_is_published(store: Store) -> None:
    draft = store.draft("a/one")
    draft.sink.write(b"half")
    assert store.names("a") == []
    draft.sink.write(b" whole")
    source = draft.written()
    with pa.OSFile(source) if isinstance(source, str) else source as file:
        assert file.read() == b"half whole"
    draft.publish("a/b/other")
    assert (store.names("", hidden=True), store.read("a/b/other")) == (["a/b/other"], b"half whole")
    gone = store.draft("a/gone")
    gone.sink.write(b"x")
    for _ in range(2):
        gone.forget()
    assert store.names("", hidden=True) == ["a/b/other"]


def test_what_is_moved_or_deleted_is_gone(store: Store) -> None:
    for name in ("a/b/1", "a/b/2", "a/c/3", "d/e/4"):
        store.put(name, name.encode())
    store.move("a/c/3", "q/a__c__3")
    store.delete(["a/b/1", "a/b/nothing"])
    assert store.names("") == ["a/b/2", "d/e/4", "q/a__c__3"]
    assert store.read("q/a__c__3") == b"a/c/3"
    store.delete_folder("a")
    store.delete_folder("nothing")
    assert (store.names(""), store.folders("a")) == (["d/e/4", "q/a__c__3"], [])


def test_one_at_a_time_holds_a_name(store: Store) -> None:
    other = store_at(store.where)
    with store.held("x/y.lock", "pid 7"):
        store.confirm("x/y.lock")
        with pytest.raises(HeldByAnother, match="pid 7"), other.held("x/y.lock", "pid 8"):
            pass
        with other.held("x/z.lock", "pid 8"):
            pass
    with other.held("x/y.lock", "pid 8"):
        pass


def test_of_many_that_want_a_name_at_once_one_has_it(s3_lake: str) -> None:
    """Nobody finds itself alone while another does."""
    inside, most, done = 0, 0, list[str]()
    lock, start = threading.Lock(), threading.Barrier(4)

    def want(number: int) -> None:
        nonlocal inside, most
        start.wait()
        try:
            with store_at(s3_lake).held("lock", f"{number}"):
                with lock:
                    inside += 1
                    most = max(most, inside)
                with lock:
                    inside -= 1
            done.append("held")
        except HeldByAnother:
            done.append("refused")

    threads = [threading.Thread(target=want, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (most <= 1, len(done)) == (True, 4)


def test_a_lease_that_is_not_renewed_is_over_by_the_clock_of_the_store() -> None:
    assert rivals("own", {"own": 100.0}, 60) == ([], [])
    assert rivals("own", {"own": 100.0, "fresh": 41.0, "old": 40.0}, 60) == (["fresh"], ["old"])
    assert rivals("own", {"own": 100.0, "later": 200.0}, 60) == (["later"], [])


def test_who_lost_a_lease_publishes_nothing(s3_lake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store, other = store_at(s3_lake), store_at(s3_lake)
    with store.held("lock", "one that stood still"):
        with monkeypatch.context() as later:
            later.setattr(s3, "LEASE_S", -1.0)
            taken = other.held("lock", "the next")
            taken.__enter__()
        try:
            with pytest.raises(Unavailable, match="is lost"):
                store.confirm("lock")
            other.confirm("lock")
        finally:
            taken.__exit__(None, None, None)


def test_requests_that_fail_now_and_then_are_made_again(s3: S3Server, s3_lake: str) -> None:
    store = store_at(s3_lake)
    for method in ("PUT", "POST", "GET", "HEAD", "DELETE"):
        s3.order({"method": method, "status": 503, "times": 1})
        store.put("a/one", b"1" * 500)
        assert store.read("a/one") == b"1" * 500
        assert store.names("a") == ["a/one"]
        store.delete(["a/one"])
        assert store.names("a") == []


def test_a_slow_answer_is_waited_for(s3: S3Server, s3_lake: str) -> None:
    store = store_at(s3_lake)
    s3.order(*({"method": method, "wait_s": 0.5, "times": 1} for method in ("PUT", "GET", "HEAD")))
    store.put("a/one", b"1")
    assert (store.names("a"), store.read("a/one")) == (["a/one"], b"1")


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (503, "S3 did not answer .*(SLOW_DOWN|SERVICE_UNAVAILABLE).*try again"),
        (403, "S3 refused access .*AWS_ACCESS_KEY_ID"),
    ],
)
def test_a_store_that_fails_is_said_in_one_line(
    s3: S3Server, s3_lake: str, monkeypatch: pytest.MonkeyPatch, status: int, said: str
) -> None:
    monkeypatch.setattr("umbel.stores.s3.ATTEMPTS", 1)
    monkeypatch.setattr("umbel.stores.s3.READ_AGAIN_S", 0.0)
    store = store_at(s3_lake)
    store.put("a/one", b"1" * 500)
    s3.order(*({"method": method, "status": status, "times": 10**6} for method in ("PUT", "GET", "POST")))
    for ask in (lambda: store.names("a"), lambda: store.put("b", b"1"), lambda: store.read("a/one")):
        with pytest.raises(Unavailable, match=said) as raised:
            ask()
        assert (raised.value.filename, len(str(raised.value).splitlines())) == (s3_lake, 1)
    with pytest.raises(Unavailable, match=said), store.held("lock", "me"):
        pass


def test_a_bucket_that_is_not_there_is_said(s3: S3Server) -> None:
    store = store_at("s3://no-such-bucket/x")
    for ask in (store.is_there, lambda: store.names("a"), lambda: store.put("b", b"1")):
        with pytest.raises(Unavailable, match="there is no such bucket; create it"):
            ask()


def test_an_answer_of_s3_is_never_taken_for_damage_of_a_file(s3: S3Server, s3_lake: str) -> None:
    """Or a build would set aside files that are whole."""
    store = store_at(s3_lake)
    store.put("one", b"1" * 500)
    s3.order({"method": "GET", "status": 403, "times": 100})
    with store.open("one") as file, pytest.raises(OSError, match="AWS Error") as raised:
        file.read()
    with pytest.raises(Unavailable, match="refused"):
        raise_unavailable(raised.value)
    raise_unavailable(OSError("Parquet magic bytes not found"))


def test_a_large_file_that_fails_half_way_is_not_there(
    s3: S3Server, s3_lake: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("umbel.stores.s3.ATTEMPTS", 1)
    store = store_at(s3_lake)
    s3.order({"method": "PUT", "with": "partNumber=2", "status": 503, "times": 100})
    draft = store.draft("events/one")
    draft.sink.write(b"x" * LARGE)
    with pytest.raises(Unavailable, match="UploadPart"):
        draft.publish("events/one")
    s3.order()
    assert store.names("events") == []
    draft.publish("events/one")  # what was written is still there
    assert store.sizes(["events/one"]) == [LARGE]


def test_who_is_killed_half_way_through_a_put_leaves_nothing(s3: S3Server, s3_lake: str) -> None:
    s3.order({"method": "PUT", "with": "partNumber=2", "wait_s": 60, "times": 1})
    code = (
        "import sys; from umbel.stores.local import store_at\n"
        f"draft = store_at(sys.argv[1]).draft('events/one'); draft.sink.write(b'x' * {LARGE})\n"
        "draft.publish('events/one')"
    )
    process = subprocess.Popen([sys.executable, "-c", code, s3_lake])
    try:
        wait_until(lambda: any("partNumber=2" in one for one in s3.asked()), what="the second part")
    finally:
        process.kill()
        process.wait()
    assert store_at(s3_lake).names("", hidden=True) == []
