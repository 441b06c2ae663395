"""ForeignBackend: the results of a project whose backend only Celery knows (`django-db`, a database, …).

Such a backend stores by itself, inside the child or in the thread that ends a message: the worker is given
nothing to store, and never asks for a result.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

from umbel.backends.interface import ChordPart
from umbel.brokers.interface import Refused
from umbel.celery.configuration import shown_backend
from umbel.errors import NotSupported
from umbel.wire.message import Outgoing, StoredResult


class ForeignBackend:
    def __init__(self, app: Any) -> None:
        self._app = app

    @property
    def url(self) -> str:
        return shown_backend(self._app)

    def shares_settle(self, broker_url: str) -> bool:
        return True  # nothing comes here, so nothing has to be stored beside the settle

    def store(self, results: Sequence[StoredResult]) -> None:
        if results:
            self._refuse()

    def read(self, task_ids: Iterable[str], timeout_s: float | None = None) -> Mapping[str, StoredResult]:
        self._refuse()

    def wait(self, task_ids: Iterable[str], timeout_s: float | None) -> Mapping[str, StoredResult]:
        self._refuse()

    async def wait_async(
        self, task_ids: Iterable[str], timeout_s: float | None
    ) -> Mapping[str, StoredResult]:
        self._refuse()

    async def read_async(
        self, task_ids: Iterable[str], timeout_s: float | None = None
    ) -> Mapping[str, StoredResult]:
        self._refuse()

    def forget(self, task_ids: Iterable[str]) -> None:
        self._refuse()

    def start_chord(self, group_id: str, size: int) -> None:
        self._refuse()

    def add_chord_part(self, part: ChordPart) -> Sequence[ChordPart] | None:
        self._refuse()

    def claim_chord(self, group_id: str, by: str) -> bool:
        self._refuse()

    def grow_chord(self, group_id: str, task_id: str) -> None:
        self._refuse()

    def end_chord(self, group_id: str, batch: Sequence[Outgoing]) -> Sequence[Refused]:
        self._refuse()

    def save_group(self, group_id: str, payload: bytes) -> None:
        self._refuse()

    def read_group(self, group_id: str) -> bytes | None:
        self._refuse()

    def forget_group(self, group_id: str) -> None:
        self._refuse()

    def close(self) -> None:
        pass

    def _refuse(self) -> NoReturn:
        raise NotSupported(
            f"the results are in {self.url}, which Celery reads and writes; use its AsyncResult"
        )
