"""Loading: from the value of -A to an app, in commands and in children.

`-A module:attr`, `-A module` (its `app`, or its only App), `-A path/to/file.py[:attr]`. Without -A: the
variable UMBEL_APP, then ./tasks.py, then ./app.py.

An app that names no directory gets that from which its module is imported: that of the file (above its
packages), else the current one.
"""

import importlib
import os
import sys
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from traceback import extract_tb
from typing import TYPE_CHECKING, Any

from umbel.app.app import App
from umbel.app.definition import AppsIn
from umbel.app.settings import Settings
from umbel.errors import AppNotFound, ConfigurationError, NoApp
from umbel.pools.guard import Raised, call_guarded
from umbel.pools.interface import HostSpec

if TYPE_CHECKING:
    from umbel.launch.project import Project

GUESSES = ("tasks", "app")
LOADER = "umbel.launch.loading:load_app"


@dataclass(frozen=True)
class FoundApp:
    """What -A names. `celery`: the `celery.Celery` that the app represents, in a Celery project."""

    app: App
    spec: HostSpec
    celery: Any = None

    @cached_property
    def project(self) -> "Project | None":
        """What a worker runs, if that is not the app itself."""
        if self.celery is None:
            return None
        from umbel.celery.project import CeleryProject  # loads all that a worker's main process needs

        return CeleryProject(self.celery)

    def worker_settings(self, node: str) -> Settings:
        """Return the settings of a worker with this name, before a command's flags."""
        if self.celery is None:
            return self.app.settings
        from umbel.celery.loading import worker_settings

        return worker_settings(self.celery, node)

    def children_may_be_copies(self) -> bool:
        """Return whether a child may be a copy of the main process as it was when the app was imported.

        Umbel's log was set up by then, so code of the app that configures an unused log had no effect. That
        matters if a Celery project configures the log itself.
        """
        return self.celery is None or bool(self.celery.conf.worker_hijack_root_logger)


def find_app(wanted: str | None) -> FoundApp:
    """Load the app that -A names, with what children need to load the same app; raises AppNotFound."""
    target = wanted or os.environ.get("UMBEL_APP") or _guess()
    module, attribute = _split(target)
    if module.endswith(".py"):
        path = Path(module).resolve()
        if not path.is_file():
            raise AppNotFound(f"-A {target}: there is no file {path}")
        directory, module = _as_module(path)
    else:
        directory = str(Path.cwd())
    canonical = f"{module}:{attribute}" if attribute else module
    loaded = _load(canonical, directory)
    if isinstance(loaded, App):
        return FoundApp(loaded, HostSpec(LOADER, canonical, (directory,)))
    return loaded


def load_app(target: str, *search_path: str) -> App:
    """Load the app in a child, from the target and search path of its HostSpec."""
    loaded = _load(target, *search_path)
    return loaded if isinstance(loaded, App) else loaded.app


def _load(target: str, *search_path: str) -> App | FoundApp:
    """Return the App in the module, or the app that represents the Celery app in it."""
    for directory in search_path:
        if directory not in sys.path:
            sys.path.insert(0, directory)
    module, attribute = _split(target)
    with AppsIn(Path(search_path[0] if search_path else ".").resolve()):
        imported = call_guarded(importlib.import_module, module)
    if isinstance(imported, Raised):
        error = imported.error
        # The module itself or a package above it is missing; else the missing module is one that it imports.
        if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
            raise AppNotFound(
                f"-A {target}: there is no module {module!r} here; run the command from its directory"
            ) from None
        kind = "" if isinstance(error, ConfigurationError) else f"{type(error).__name__}: "
        raise AppNotFound(
            f"-A {target}: importing {module!r} failed: {kind}{error}{_place_of(error)}"
        ) from error
    if attribute:
        found = getattr(imported.value, attribute, None)
        if isinstance(found, App):
            return _discovered(found, target)
    elif _apps(vars(imported.value)):
        return _discovered(_only_app(vars(imported.value), target), target)
    project = _celery_project(target, search_path)
    if project is not None:
        return project
    if attribute:
        raise AppNotFound(
            f"-A {target}: {module!r} has no App named {attribute!r}{_others(vars(imported.value))}"
        )
    return _discovered(_only_app(vars(imported.value), target), target)


def _discovered(app: App, target: str) -> App:
    """Return the app, after importing the modules that it names (`autodiscover_tasks`)."""
    happened = call_guarded(app.discovery.run)
    if isinstance(happened, Raised):
        error = happened.error
        raise AppNotFound(
            f"-A {target}: importing tasks failed: {type(error).__name__}: {error}{_place_of(error)}"
        ) from error
    return app


def _celery_project(target: str, search_path: tuple[str, ...]) -> FoundApp | None:
    module = target.partition(":")[0]
    if "celery" not in sys.modules and not _has_celery_module(module):
        return None
    # Imported here: only for projects that use Celery.
    from umbel.celery import configuration, loading

    app = loading.find_celery(target)
    if app is None:
        return None
    stands_for = configuration.app_for(app)
    return FoundApp(stands_for, HostSpec(loading.LOADER, target, search_path), app)


def _has_celery_module(module: str) -> bool:
    """Return whether there is a `proj/celery.py`, where Celery looks if -A names the package `proj`."""
    is_package = hasattr(sys.modules.get(module), "__path__")
    return is_package and find_spec(f"{module}.celery") is not None


def _as_module(path: Path) -> tuple[str, str]:
    """Return the directory to search and the dotted name: a task has one name however it is loaded."""
    package, names = path.parent, [path.stem]
    while (package / "__init__.py").is_file():
        names.insert(0, package.name)
        package = package.parent
    return str(package), ".".join(names)


def _place_of(error: BaseException) -> str:
    """Return where in the user's code an import failed, as ` (tasks.py, line 3)`."""
    if isinstance(error, SyntaxError):
        return ""  # its text names the place; the frames are those of the importer
    passed_over = ("<", str(Path(__file__).parents[1]))  # importlib, and Umbel itself
    frames = [
        frame for frame in extract_tb(error.__traceback__) if not frame.filename.startswith(passed_over)
    ]
    return f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""


def _only_app(names: dict[str, object], target: str) -> App:
    apps = _apps(names)
    if "app" in apps:
        return apps["app"]
    if len({id(app) for app in apps.values()}) == 1:
        return next(iter(apps.values()))
    if apps:
        raise AppNotFound(
            f"-A {target}: it contains several apps; name one of {', '.join(sorted(apps))} after a colon"
        )
    raise AppNotFound(f"-A {target}: it contains no App; write: app = App({target.rpartition('.')[2]!r})")


def _others(names: dict[str, object]) -> str:
    apps = sorted(_apps(names))
    return f"; it has {', '.join(apps)}" if apps else ""


def _apps(names: dict[str, object]) -> dict[str, App]:
    return {name: value for name, value in names.items() if isinstance(value, App)}


def _split(target: str) -> tuple[str, str]:
    module, _, attribute = target.partition(":")
    return module, attribute


def _guess() -> str:
    for guess in GUESSES:
        if Path(f"{guess}.py").is_file():
            return guess
    raise NoApp("no app given, and neither ./tasks.py nor ./app.py exists; use -A module:attr")
