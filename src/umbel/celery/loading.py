"""Find a Celery app by Celery's own rules, and load it the way Celery's worker does."""

from typing import Any

from celery import VERSION, Celery, signals
from celery.app import backends
from celery.app.utils import find_app

from umbel.app.configuration.settings import Settings
from umbel.celery.configuration import settings_of
from umbel.celery.stand_in import WorkerStandIn
from umbel.errors import AppNotFound, ConfigurationError
from umbel.pools.guard import Raised, call_guarded

LOADER = "umbel.celery.host:load_host"  # what a child needs, and the main process does not
OLDEST = (5, 7)


def find_celery(target: str) -> Any | None:
    """The `celery.Celery` that -A TARGET names, or None where there is none."""
    found = call_guarded(find_app, target)
    if isinstance(found, Raised):
        if isinstance(found.error, AttributeError | ImportError):
            return None
        raise AppNotFound(f"-A {target}: {type(found.error).__name__}: {found.error}") from found.error
    if not isinstance(found.value, Celery):
        return None
    if tuple(VERSION[:2]) < OLDEST:
        version, needed = ".".join(map(str, VERSION[:3])), ".".join(map(str, OLDEST))
        raise ConfigurationError(
            f"-A {target} is a Celery app, and Celery {version} is installed: Umbel runs Celery projects "
            f"with Celery {needed} or newer; run: pip install -U 'celery>={needed}'"
        )
    return found.value


def load(app: Any, node: str = "") -> Any:
    """Import everything the project says its tasks are in; `import_modules` is sent once.

    For a worker of this name `celeryd_init` comes before tasks read the settings.
    """
    if not getattr(app, "umbel_loaded", False):
        app.set_current()
        app.set_default()
        app.loader.init_worker()  # imports, and the hooks that hang on it
        if node:
            told = {"instance": WorkerStandIn(app, node), "conf": app.conf, "options": {}}
            signals.celeryd_init.send(sender=node, **told)
        app.finalize()
        app.umbel_loaded = True
    return app


def worker_settings(app: Any, node: str) -> Settings:
    load(app, node)
    app.umbel_app = None  # a handler may have changed what was read before
    return settings_of(app)


def note_task_modules(app: Any) -> None:
    """In a worker `app.conf.include` names the modules of all tasks, for projects and for `inspect conf`."""
    modules = {type(task).__module__ for task in app.tasks.values()}
    app.conf.include = tuple({*app.conf.include, *modules})


def load_for_children(app: Any, node: str) -> None:
    """Load it where children are made; nothing is left to load where the main process has done so already."""
    note_task_modules(load(app, node))
    # What tasks need is imported before children are forked, so that they share one copy of it.
    call_guarded(lambda: backends.by_url(app.backend_cls or app.conf.result_backend, app.loader))
    call_guarded(lambda: app.connection_for_write().get_transport_cls())
    call_guarded(lambda: (app.log, app.events))
