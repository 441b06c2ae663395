"""Results: Celery's backends inside a worker.

If the project's results are in Redis or are sent back (rpc), they are the same bytes that Umbel's own
backends store, so the results of an ending task are captured and stored together with its settle. Every other
backend (`django-db`, `database`, `cache`, files, …) stores by itself, before the settle, as under Celery. For
these the worker has a ForeignBackend: it is given nothing to store, and is never asked for a result.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NoReturn

from umbel.app.settings import Settings
from umbel.backends.interface import Backend, ChordPart, Take
from umbel.backends.registry import open_backend, sends_results
from umbel.brokers.interface import Refused
from umbel.celery.configuration import broker_settings, shown_backend
from umbel.celery.connection_settings import backend_url
from umbel.celery.messages import CAPTURE, captured_call
from umbel.errors import NotSupported
from umbel.wire.message import Outgoing, StoredResult

# ---- results ---------------------------------------------------------------------------------------
#
# Celery's backends inside a worker.
#
# Where the project's results are in Redis or are sent back (rpc), they are the same bytes that Umbel's own
# backends store, so an ending task's results are captured and travel with its settle. Every other backend
# (`django-db`, `database`, `cache`, files, …) stores by itself, before the settle, as under Celery.

ENDS = frozenset({"SUCCESS", "FAILURE", "RETRY", "REVOKED"})


def open_results(app: Any, settings: Settings) -> Backend | None:
    """The backend that stores results, if Umbel does that; else None. Celery's backends of the app are
    captured.
    """
    ours = open_backend(settings.backend, broker_settings(app, settings)) if backend_url(app) else None
    shares_settle = ours is not None and ours.shares_settle(settings.broker)
    _install(app, ours, shares_settle=shares_settle, keeps_all=not sends_results(settings.backend))
    return ours


def _install(app: Any, ours: Backend | None, *, shares_settle: bool, keeps_all: bool) -> None:
    """Wrap every backend that this process opens for the app; Celery opens one per thread."""
    made = app._get_backend

    def get_backend() -> Any:
        backend = made()
        captures = _captures(type(backend))
        backend.__class__ = type(type(backend).__name__, (*captures, type(backend)), {})
        if _CapturesRedis in captures and ours is not None:
            backend.umbel_backend, backend.umbel_shares_settle = ours, shares_settle
            _replace_chord_scripts(backend)
        if _CapturesRpc in captures:
            backend.umbel_keeps_all = keeps_all
        return backend

    app._get_backend = get_backend
    app._backend_cache = None  # a backend that was opened before, perhaps before a fork, is not used
    vars(app._local).pop("backend", None)


def _captures(kind: type) -> tuple[type, ...]:
    # By name: importing the classes would load the Redis client into processes that need none.
    names = {f"{base.__module__}:{base.__name__}" for base in kind.__mro__}
    if "celery.backends.redis:RedisBackend" in names:
        return (_CapturesErrbacks, _CapturesRedis)
    if "celery.backends.rpc:RPCBackend" in names:
        return (_CapturesErrbacks, _CapturesRpc)
    return (_CapturesErrbacks,)


class _CapturesErrbacks:
    def _call_task_errbacks(self, *args: Any, **kwargs: Any) -> None:
        captured_call(super()._call_task_errbacks, *args, **kwargs)  # type: ignore[misc]


class _CapturesRedis:
    """Results wait in the capture; a reader in between (the join of a nested chord) sees them."""

    def _store_result(
        self, task_id: str, result: Any, state: str, traceback: Any = None, request: Any = None, **kwargs: Any
    ) -> Any:
        capture, backend = CAPTURE.get(), self._celery()
        if capture is None or state not in ENDS or not capture.keeps_results:
            return super()._store_result(  # type: ignore[misc]
                task_id, result, state, traceback=traceback, request=request, **kwargs
            )
        meta = backend._get_result_meta(result=result, state=state, traceback=traceback, request=request)
        meta["task_id"] = task_id
        # The store sees to it that the first SUCCESS stays, so nothing is read here.
        capture.by_task[task_id] = StoredResult(task_id, state, _bytes(backend.encode(meta)))
        return result

    def on_chord_part_return(self, request: Any, state: str, result: Any, **kwargs: Any) -> Any:
        """Store the result first: the task that ends the chord reads all parts next."""
        capture, ours = CAPTURE.get(), vars(self).get("umbel_backend")
        stored = capture.by_task.get(request.id) if capture is not None else None
        if capture is not None and stored is not None and ours is not None:
            ours.store([stored])
            del capture.by_task[request.id]
        return super().on_chord_part_return(request, state, result, **kwargs)  # type: ignore[misc]

    def _handle_group_chord_error(self, *args: Any, **kwargs: Any) -> Any:
        """The body's tasks are stored as failed, then revoked: workers that receive the revoke must find the
        state.
        """
        capture = CAPTURE.get()
        with capture.storing_at_once() if capture else nullcontext():
            return super()._handle_group_chord_error(*args, **kwargs)  # type: ignore[misc]

    def get(self, key: Any) -> Any:
        found = self._captured(key)
        return super().get(key) if found is None else found  # type: ignore[misc]

    def mget(self, keys: Any) -> Any:
        stored = super().mget(keys)  # type: ignore[misc]
        return [self._captured(key) or value for key, value in zip(keys, stored, strict=True)]

    def _captured(self, key: Any) -> bytes | None:
        capture = CAPTURE.get()
        if capture is None or not capture.by_task:
            return None
        key_of = self._celery().get_key_for_task
        for task_id, stored in capture.by_task.items():
            if _bytes(key_of(task_id)) == _bytes(key):
                return stored.payload
        return None

    def _celery(self) -> Any:
        return self


class _CapturesRpc:
    """Results go to the client that asked; if UMBEL_BACKEND has moved them to a store, that keeps all of
    them.
    """

    umbel_keeps_all = False

    def store_result(
        self, task_id: str, result: Any, state: str, traceback: Any = None, request: Any = None, **kwargs: Any
    ) -> Any:
        capture, backend = CAPTURE.get(), self._celery()
        reply_to = getattr(request, "reply_to", None) or ""
        if capture is None or state not in ENDS or not (reply_to or self.umbel_keeps_all):
            return super().store_result(  # type: ignore[misc]
                task_id, result, state, traceback=traceback, request=request, **kwargs
            )
        result = backend.encode_result(result, state)
        meta = backend._to_result(task_id, state, result, traceback, request)
        payload = _bytes(backend.encode(meta))
        capture.by_task[task_id] = StoredResult(task_id, state, payload, reply_to)
        return result

    def _celery(self) -> Any:
        return self


def _replace_chord_scripts(backend: Any) -> None:
    """The task that brings the last part claims the chord under its own name, and may repeat that.

    Ending the chord sends the body and marks the chord done in one step, if broker and results share a
    server. Else the body is sent with the settle, and the chord is marked done afterwards.
    """
    ours: Backend = backend.umbel_backend
    add, clean, extend = (
        _lasting(backend, script)
        for script in (
            backend._chord_part_return_script,
            backend._chord_cleanup_script,
            backend._chord_claim_extend_script,
        )
    )
    token = ""

    def add_part(keys: list[Any], args: list[Any], client: Any) -> Any:
        nonlocal token
        token = f"{args[0]}:{args[3]}"
        ready, more, size, claimed = add(keys=keys, args=[*args[:-1], token], client=client)
        if not claimed and size and ready == int(size) + int(more or 0):
            claimed = int(_bytes(client.get(keys[5]) or b"") == token.encode())
        return ready, more, size, claimed

    def extend_claim(keys: list[Any], args: list[Any], client: Any) -> Any:
        return extend(keys=keys, args=[token, *args[1:]], client=client)

    def end_chord(keys: list[Any], args: list[Any], client: Any) -> Any:
        capture = CAPTURE.get()
        if capture is None:
            return clean(keys=keys, args=[token, *args[1:]], client=client)
        group_id = _bytes(keys[1]).decode().removeprefix(_group_prefix(backend)).removesuffix(".j")
        if backend.umbel_shares_settle:
            ours.end_chord(group_id, capture.take_last_sent())
        else:
            capture.chords.append(group_id)
        return 1

    vars(backend).update(
        _chord_part_return_script=add_part,
        _chord_claim_extend_script=extend_claim,
        _chord_cleanup_script=end_chord,
    )


def _lasting(backend: Any, script: Callable[..., Any]) -> Callable[..., Any]:
    """Retry the script while Redis is unavailable, as long as Celery retries storing a result: running it
    twice is harmless.
    """

    def run(**how: Any) -> Any:
        return backend.ensure(lambda: script(**how), ())

    return run


def mark_chords(ours: Backend, work: Sequence[bytes]) -> None:
    """After the settle: mark these chords done, so that no redelivered part sends their bodies again."""
    for group_id in b"\n".join(work).decode().split("\n"):
        ours.end_chord(group_id, ())


def _group_prefix(backend: Any) -> str:
    return _bytes(backend.get_key_for_group("-")).decode().removesuffix("-")


def _bytes(value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


# ---- foreign backend -------------------------------------------------------------------------------
#
# The results of a project whose backend only Celery knows (`django-db`, a database, …).
#
# Such a backend stores by itself, inside the child or in the thread that ends a message: the worker is
# given nothing to store, and never asks for a result.


class ForeignBackend(Backend):
    """The worker's backend if Celery's own one stores the results: it stores nothing, and refuses to be
    asked.
    """

    def __init__(self, app: Any) -> None:
        self._app = app

    @property
    def url(self) -> str:
        """The address of Celery's backend, without its password."""
        return shown_backend(self._app)

    def shares_settle(self, broker_url: str) -> bool:
        """Always True: nothing is stored here, so no separate step is needed."""
        return True  # nothing comes here, so nothing has to be stored beside the settle

    def store(self, results: Sequence[StoredResult]) -> None:
        """Accepts no results: NotSupported if there are any."""
        if results:
            self._refuse()

    def read(self, task_ids: Iterable[str], timeout_s: float | None = None) -> Mapping[str, StoredResult]:
        """Raises NotSupported: Celery's backend does this itself."""
        self._refuse()

    def wait(
        self, task_ids: Iterable[str], timeout_s: float | None, take: Take | None = None
    ) -> Mapping[str, StoredResult]:
        """Raises NotSupported: Celery's backend does this itself."""
        self._refuse()

    async def wait_async(
        self, task_ids: Iterable[str], timeout_s: float | None, take: Take | None = None
    ) -> Mapping[str, StoredResult]:
        """Raises NotSupported: Celery's backend does this itself."""
        self._refuse()

    async def read_async(
        self, task_ids: Iterable[str], timeout_s: float | None = None
    ) -> Mapping[str, StoredResult]:
        """Raises NotSupported: Celery's backend does this itself."""
        self._refuse()

    def forget(self, task_ids: Iterable[str]) -> None:
        """Raises NotSupported: Celery's backend does this itself."""
        self._refuse()

    def start_chord(self, group_id: str, size: int) -> None:
        """Raises NotSupported: Celery's backend does this itself."""
        self._refuse()

    def add_chord_part(self, part: ChordPart) -> Sequence[ChordPart] | None:
        """Raises NotSupported: Celery's backend does this itself."""
        self._refuse()

    def claim_chord(self, group_id: str, by: str) -> bool:
        """Raises NotSupported: Celery's backend does this itself."""
        self._refuse()

    def grow_chord(self, group_id: str, task_id: str) -> None:
        """Raises NotSupported: Celery's backend does this itself."""
        self._refuse()

    def end_chord(self, group_id: str, batch: Sequence[Outgoing]) -> Sequence[Refused]:
        """Raises NotSupported: Celery's backend does this itself."""
        self._refuse()

    def save_group(self, group_id: str, payload: bytes) -> None:
        """Raises NotSupported: Celery's backend does this itself."""
        self._refuse()

    def read_group(self, group_id: str) -> bytes | None:
        """Raises NotSupported: Celery's backend does this itself."""
        self._refuse()

    def forget_group(self, group_id: str) -> None:
        """Raises NotSupported: Celery's backend does this itself."""
        self._refuse()

    def close(self) -> None:
        """Nothing is open."""

    def _refuse(self) -> NoReturn:
        raise NotSupported(
            f"the results are in {self.url}, which Celery reads and writes; use its AsyncResult"
        )
