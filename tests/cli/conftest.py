import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.running import Ran, Umbel
from umbel.cli.main import main


@pytest.fixture
def umbel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Umbel]:
    """Runs the command in this process, in an empty directory."""
    monkeypatch.chdir(tmp_path)
    for name in ("UMBEL_APP", "UMBEL_RUN_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "path", list(sys.path))
    loaded_before = dict(sys.modules)

    def forget_apps() -> None:
        """A new process would load ./tasks.py, whoever loaded another one in this process before."""
        for file in tmp_path.glob("*.py"):
            sys.modules.pop(file.stem, None)

    def run(*arguments: str) -> Ran:
        monkeypatch.setattr(sys, "argv", ["umbel", *arguments])
        forget_apps()
        variables = dict(os.environ)  # -b of a command that loads the app is a variable of its process
        try:
            with pytest.raises(SystemExit) as ended:
                main()
        finally:
            os.environ.clear()
            os.environ.update(variables)
        out, err = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return Ran(ended.value.code, out, err)

    yield run
    forget_apps()
    sys.modules |= {name: module for name, module in loaded_before.items() if name not in sys.modules}
