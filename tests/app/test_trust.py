"""Trust is inherited: what an unsigned message causes is unsigned, and names it; the rest is signed.

Each case is one way in which the run of a task makes a message. The app has keys, so without the rule each of
these messages would be signed, and run on queues that need a signature.
"""

import asyncio
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from msgspec.structs import replace

from umbel import App, chord, group
from umbel.app.cluster.topics import send_elected
from umbel.app.request import Request, RequestScope
from umbel.app.running.async_tracer import AsyncTracer
from umbel.app.running.tracer import Tracer
from umbel.app.sending.signing import is_trusted
from umbel.brokers.interface import BrokerSettings
from umbel.brokers.registry import open_broker, open_producer
from umbel.coordination.election_context import ElectionContext
from umbel.errors import BrokerUnavailable, NoClusterId, WorkerLost
from umbel.launch.project import NativeEndings
from umbel.outbox.table import decode_row
from umbel.pools.interface import Job
from umbel.protocol.delivery.trust import UNSIGNED, ClusterId, Doubted, Signed
from umbel.protocol.election.events import RunHandler
from umbel.protocol.leadership.coordination import ElectionRequest, Policy
from umbel.wire.message import Outgoing
from umbel.wire.signing import Signer
from umbel.wire.values import decode_json, encode_json

KEYS = "k:" + "s" * 32
CAUSE = "the-cause"


@pytest.fixture
def app(tmp_path: Path) -> Iterator[App]:
    made = App(
        "trust",
        broker=f"sqlite:///{tmp_path}/umbel.db",
        signing_keys=[KEYS],
        signing_cluster="here",
        task_routes={"target": "internal"},
    )

    @made.task(name="target")
    def target(*_: Any) -> None: ...

    @made.task(name="told")
    def told(request: Any, error: Any, traceback: Any) -> None:
        made.send_task("target")

    yield made
    made.close()


def signer_of(app: App) -> Signer:
    signer = app.signing_cluster.signer()
    assert signer is not None
    return signer


def waiting(app: App, queue: str = "internal") -> list[Outgoing]:
    """What was sent to the broker."""

    async def look() -> list[Outgoing]:
        broker = open_broker(app.settings.for_broker())
        await broker.open()
        try:
            return [Outgoing(one.queue, one.message) for one in await broker.peek(queue, 100)]
        finally:
            await broker.close()

    return asyncio.run(look())


def proofs(app: App, sent: list[Outgoing]) -> list[Signed | Doubted]:
    return [signer_of(app).check_task(one.message, one.queue)[0] for one in sent]


# -- what a run sends ------------------------------------------------------------------------------

Given = tuple[str, dict[str, Any]]  # the task that runs, and the options of its call


def with_a_callback(app: App) -> Given:
    return plain(app), {"link": app.tasks["target"].s()}


def in_a_chain(app: App) -> Given:
    return plain(app), {"chain": [app.tasks["target"].si().to_map()]}


def with_an_errback(app: App) -> Given:
    return failing(app), {"link_error": app.tasks["target"].si()}


def with_an_errback_that_sends(app: App) -> Given:
    return failing(app), {"link_error": app.signature("told")}


def in_a_chord(app: App) -> Given:
    """Its last part brings the body."""
    task = app.tasks[plain(app)]
    whole = chord([task.s()], app.tasks["target"].s())
    whole.freeze("body")
    (part,) = whole.prepare()
    headers = decode_json(part.outgoing.message.headers)
    body = decode_json(part.outgoing.message.body)
    return task.name, {"group_id": headers["group"], "group_index": 0, "chord": body[2]["chord"]}


def in_a_chord_that_fails(app: App) -> Given:
    name, options = in_a_chord(app)
    app.tasks.pop(name)
    body = {
        **options["chord"],
        "options": {"task_id": CAUSE, "link_error": [app.tasks["target"].si().to_map()]},
    }
    return failing(app), {**options, "chord": body}


def that_retries(app: App) -> Given:
    @app.task(name="work", bind=True, queue="internal")
    def work(self: Any) -> None:
        raise self.retry()

    return work.name, {}


def that_retries_elsewhere(app: App) -> Given:
    @app.task(name="work", bind=True)
    def work(self: Any, *args: Any) -> None:
        raise self.retry(queue="internal", args=[1])

    return work.name, {}


def that_is_retried_by_itself(app: App) -> Given:
    @app.task(name="work", autoretry_for=(ValueError,), queue="internal")
    def work() -> None:
        raise ValueError

    return work.name, {}


def that_replaces_itself(app: App) -> Given:
    @app.task(name="work", bind=True)
    def work(self: Any) -> None:
        self.replace(app.tasks["target"].si())

    return work.name, {}


def that_sends(app: App) -> Given:
    return running(app, app.tasks["target"].delay)


def that_sends_by_name(app: App) -> Given:
    return running(app, lambda: app.send_task("target", queue="internal"))


def that_sends_many(app: App) -> Given:
    return running(app, lambda: app.send_many([app.tasks["target"].s()] * 2))


def that_sends_a_group(app: App) -> Given:
    return running(app, lambda: group(app.tasks["target"].s(), app.tasks["target"].s()).delay())


def that_sends_in_a_thread(app: App) -> Given:
    def send() -> None:
        thread = Thread(target=app.tasks["target"].delay)
        thread.start()
        thread.join()

    return running(app, send)


def plain(app: App) -> str:
    return running(app, lambda: None)[0]


def failing(app: App) -> str:
    def fail() -> None:
        raise ValueError("why")

    return running(app, fail)[0]


def running(app: App, code: Callable[[], object]) -> Given:
    def work() -> None:
        code()

    return app.task(name="work")(work).name, {}


WAYS = [
    with_a_callback,
    in_a_chain,
    with_an_errback,
    with_an_errback_that_sends,
    in_a_chord,
    in_a_chord_that_fails,
    that_retries,
    that_retries_elsewhere,
    that_is_retried_by_itself,
    that_replaces_itself,
    that_sends,
    that_sends_by_name,
    that_sends_many,
    that_sends_a_group,
    that_sends_in_a_thread,
]


def sent_by(app: App, way: Callable[[App], Given], signs_for: str | None) -> list[Outgoing]:
    """What a worker would send, or has sent, for one run."""
    name, options = way(app)
    message = app.prepare(name, [], {}, {"task_id": CAUSE, **options}).outgoing.message  # type: ignore[typeddict-item]
    tracer = Tracer(app, hostname="w@host")
    with closing(tracer):
        outcome = tracer(Job(1, name, CAUSE, "internal", message, signs_for=signs_for))
    return [*outcome.follow_ups, *waiting(app)]


@pytest.mark.parametrize("way", WAYS)
def test_what_an_unsigned_message_causes_is_unsigned_and_names_it(
    app: App, way: Callable[[App], Given]
) -> None:
    sent = sent_by(app, way, UNSIGNED)
    assert sent
    for proof in proofs(app, sent):
        assert isinstance(proof, Doubted)
        assert proof.reason.startswith("unsigned: ")
        assert f"'{CAUSE}'" in proof.why


@pytest.mark.parametrize("way", WAYS)
def test_what_a_signed_message_causes_is_signed(app: App, way: Callable[[App], Given]) -> None:
    sent = sent_by(app, way, "here")
    assert sent
    assert all(isinstance(proof, Signed) for proof in proofs(app, sent))


@pytest.mark.parametrize(("signs_for", "kind"), [(UNSIGNED, Doubted), ("here", Signed)])
def test_a_coroutine_passes_on_the_trust_of_its_message(app: App, signs_for: str, kind: type) -> None:
    target = app.tasks["target"]

    @app.task(name="work")
    async def work() -> None:
        await target.adelay()
        await app.asend_many([target.s()])
        await group(target.s(), target.s()).adelay()
        await asyncio.to_thread(target.delay)

    message = app.prepare("work", [], {}, {"task_id": CAUSE, "link": target.si()}).outgoing.message

    async def run() -> list[Outgoing]:
        tracer = AsyncTracer(app, hostname="w@host")
        outcome = await tracer.run(Job(1, "work", CAUSE, "internal", message, signs_for=signs_for))
        tracer.close()
        await app.aclose()
        return list(outcome.follow_ups)

    found = proofs(app, [*asyncio.run(run()), *waiting(app)])
    assert [type(one) for one in found] == [kind] * 6


@pytest.mark.parametrize(("signs_for", "kind"), [(UNSIGNED, Doubted), ("here", Signed)])
def test_what_a_task_leaves_behind_that_did_not_run_has_the_trust_of_its_message(
    app: App, signs_for: str, kind: type
) -> None:
    name, options = in_a_chord_that_fails(app)
    options["link_error"] = [app.tasks["target"].si(), app.signature("told")]
    message = app.prepare(name, [], {}, {"task_id": CAUSE, **options}).outgoing.message  # type: ignore[typeddict-item]
    leave = NativeEndings(app)
    ending = leave(message, "internal", WorkerLost("why"), "FAILURE", signs_for=signs_for)
    assert ending.before is not None
    sent = [*ending.follow_ups, *ending.before().follow_ups]
    leave._errbacks.wait_called(60)
    found = proofs(app, [*sent, *waiting(app)])
    assert [type(one) for one in found] == [kind] * 3


def test_the_row_of_an_outbox_has_the_trust_of_the_task_that_writes_it(app: App, tmp_path: Path) -> None:
    database = sqlite3.connect(tmp_path / "own.db")
    database.execute("CREATE TABLE umbel_outbox (id INTEGER PRIMARY KEY, task_id text, message BLOB)")

    def rows() -> list[Outgoing]:
        found = database.execute("SELECT message FROM umbel_outbox ORDER BY id").fetchall()
        return [decode_row(message) for (message,) in found]

    with closing(database):
        for request in (None, Request(id=CAUSE, signs_for="here"), Request(id=CAUSE, signs_for=UNSIGNED)):
            database.execute("BEGIN")
            with app.outbox(database):
                if request is None:
                    app.tasks["target"].delay()
                else:
                    with RequestScope(request):
                        app.tasks["target"].delay()
            database.commit()
        client, trusted, unsigned = proofs(app, rows())
    # No broker may be reachable in a transaction, so a row is bound to no cluster; the relay does that.
    assert isinstance(client, Signed) and isinstance(trusted, Signed)
    assert not client.is_bound and not trusted.is_bound
    assert isinstance(unsigned, Doubted) and CAUSE in unsigned.why


# -- what else may cause a message ------------------------------------------------------------------


def elected(election_id: str) -> ElectionContext:
    request = ElectionRequest(election_id, "task", b"{}", Policy.AT_MOST_ONCE, 0.0)
    return ElectionContext(RunHandler(request, "key", 7, 1, 1e12))


def test_an_election_that_anyone_opens_sends_an_unsigned_task(app: App) -> None:
    """Elections are not signed; what a client with keys asks for carries a signature for that election."""
    call = app.tasks["target"].s().to_map()
    genuine = decode_json(encode_json(app.topics.action_of("e1", "task", call)))
    for action, election_id in (
        (call, "e0"),
        (genuine, "e2"),
        ({**genuine, "args": [9]}, "e1"),
        (genuine, "e1"),
        (genuine, "e1"),
    ):
        send_elected(app, action, elected(election_id))
    *forged, first, second = proofs(app, waiting(app))
    assert all(isinstance(one, Doubted) for one in forged)
    assert len(forged) == 3
    assert isinstance(first, Signed) and isinstance(second, Signed)
    assert first.mark == second.mark  # elected twice, it is sent twice, and runs once
    with RequestScope(Request(id=CAUSE, signs_for=UNSIGNED)):
        assert app.topics.action_of("e3", "task", call) == call


def test_the_schedule_is_signed_whatever_runs_in_its_process_meanwhile(app: App) -> None:
    """Else one unsigned task, or an election that anyone opens, would keep scheduled tasks from running."""
    app.periodic(every=60)(app.tasks["target"])
    (entry,) = app.periodic_tasks
    sent: list[Outgoing] = []
    with RequestScope(Request(id=CAUSE, signs_for=UNSIGNED)):
        beside = Thread(target=lambda: sent.extend(entry.messages(0)))
        beside.start()
        beside.join()
    (proof,) = proofs(app, sent)
    assert isinstance(proof, Signed)


def test_an_unsigned_task_signs_no_command(app: App) -> None:
    sent: list[bytes] = []

    class Recording:
        capabilities = app.producer.capabilities

        def broadcast(self, batch: Any, *, ttl_s: float) -> None:
            sent.extend(one.headers for one in batch)

        def close(self) -> None: ...

    app._producer = Recording()  # type: ignore[assignment]
    app.control.broadcast("shutdown")
    with RequestScope(Request(id=CAUSE, signs_for=UNSIGNED)):
        assert not is_trusted()
        app.control.broadcast("shutdown")
    assert is_trusted()
    assert [b"umbel_signature" in one for one in sent] == [True, False]


# -- what is signed for ------------------------------------------------------------------------------


def test_a_client_asks_its_broker_once_what_it_signs_for_and_makes_no_id(tmp_path: Path) -> None:
    settings = BrokerSettings(f"sqlite:///{tmp_path}/umbel.db")
    app = App("client", broker=settings.url, signing_keys=[KEYS])
    with closing(app):
        with pytest.raises(NoClusterId, match="umbel cluster-id make"):
            app.send_task("target")

        async def send() -> None:
            await app.asend_task("target")
            await app.aclose()

        with pytest.raises(NoClusterId):
            asyncio.run(send())
        with closing(open_producer(settings)) as producer:
            assert producer.cluster_id() is None

        async def make() -> None:
            broker = open_broker(settings)
            await broker.open()
            await broker.keep_cluster_id(ClusterId("made"))
            await broker.close()

        asyncio.run(make())
        asyncio.run(send())
        app.send_task("target")
        found = proofs(app, waiting(app, "celery"))
        assert [isinstance(one, Signed) and one.is_bound for one in found] == [True, True]
        assert signer_of(app).cluster.id == "made"
        app.producer.close()
        app._producer = None  # nothing is asked again
        assert signer_of(app).cluster.id == "made"
        assert app._producer is None


def test_a_broker_that_is_away_is_waited_for_as_for_sending(tmp_path: Path) -> None:
    app = App("client", broker="redis://127.0.0.1:1/0", signing_keys=[KEYS], publish_timeout_s=0.1)
    with closing(app), pytest.raises(BrokerUnavailable):
        app.send_task("target")


def test_nothing_is_signed_in_eager_mode(app: App) -> None:
    eager = App("eager", broker="redis://127.0.0.1:1/0", signing_keys=[KEYS], task_always_eager=True)
    with closing(eager):
        assert eager.task(name="one")(lambda: 1).delay().get() == 1
    with app.eager():
        assert app.tasks["target"].delay().get() is None


def test_a_task_runs_for_the_cluster_of_its_message_without_asking(app: App) -> None:
    """A child need not open a connection to know what it signs for."""
    app.settings = replace(app.settings, signing_cluster="")
    app.send_defaults.clear()
    ran: list[str] = []

    @app.task(name="work")
    def work() -> None:
        ran.append(signer_of(app).cluster.id)

    with closing(Tracer(app, hostname="w@host")) as tracer:
        app.signing_cluster.learn("first")
        message = app.prepare("work", [], {}, {"link": app.tasks["target"].si()}).outgoing.message
        outcome = tracer(Job(1, "work", CAUSE, "celery", message, signs_for="first"))
    assert ran == ["first"]
    assert app._producer is None
    (proof,) = proofs(app, list(outcome.follow_ups))
    assert isinstance(proof, Signed)
