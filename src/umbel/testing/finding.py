"""Which app a project's tests are about: the one that its pytest settings name, else a new one."""

from pathlib import Path

from umbel.app.app import App
from umbel.errors import AppNotFound
from umbel.launch.loading import load_app


def app_under_test(target: str, directory: Path) -> App:
    """`target` is `module:attribute`, imported as the tests import it; "": no app is named."""
    if not target:
        return App("tests")
    try:
        return load_app(target, str(directory))
    except AppNotFound as error:
        raise AppNotFound(f"umbel_app = {target} in pytest's settings: {error}") from error
