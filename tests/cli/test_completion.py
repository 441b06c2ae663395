"""The shell can complete commands, options and names, as docs/commands.md says."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.shell_completion import BashComplete

from umbel.cli.main import cli


def complete(tmp_path: Path, *words: str) -> list[str]:
    """What bash would be offered after these words."""
    ran = subprocess.run(
        [sys.executable, "-c", "import sys; sys.argv[0] = 'umbel'; from umbel.cli.main import main; main()"],
        env={
            **os.environ,
            "_UMBEL_COMPLETE": "bash_complete",
            "COMP_WORDS": " ".join(["umbel", *words]),
            "COMP_CWORD": str(len(words)),
        },
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return [line.partition(",")[2] for line in ran.stdout.splitlines()]


TASKS = """
from umbel import App
print("loaded")
app = App("shop", task_routes={"tasks.pack": "parcels"})

@app.task
def pack(): ...

@app.task
def pay(): ...

@app.panel.inspect_command
def stock(state): ...
"""


@pytest.mark.parametrize(
    ("words", "offered"),
    [(["inspe"], {"inspect"}), (["ping", "--t"], {"--timeout"}), (["revoke", "--u"], {"--undo"})],
)
def test_the_shell_is_offered_commands_and_options(
    tmp_path: Path, words: list[str], offered: set[str]
) -> None:
    assert set(complete(tmp_path, *words)) == offered


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["call", "tasks.pa"], {"tasks.pack", "tasks.pay"}),
        (["-A", "tasks:app", "call", "tasks.pac"], {"tasks.pack"}),
        (["call", "tasks.pay", "-q", ""], {"celery", "parcels"}),
        (["queues", "peek", "p"], {"parcels"}),
        (["worker", "-Q", "celery,p"], {"celery,parcels"}),
        (["inspect", "sto"], {"stock"}),
        (["control", "shut"], {"shutdown"}),
        (["ping", "-d", "w"], set()),
    ],
)
@pytest.mark.usefixtures("umbel")
def test_the_shell_is_offered_what_the_app_and_the_broker_know(
    tmp_path: Path, words: list[str], offered: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tasks.py").write_text(TASKS)
    assert offered_after(*words) == offered
    assert capsys.readouterr() == ("", "")


@pytest.mark.usefixtures("umbel")
def test_nothing_is_offered_where_nothing_can_be_asked(tmp_path: Path) -> None:
    (tmp_path / "tasks.py").write_text("import nowhere\n")
    assert offered_after("call", "t") == offered_after("ping", "-d", "w") == set()


def offered_after(*words: str) -> set[str]:
    """The same in this process, where the words before are known to be commands and options."""
    shell = BashComplete(cli, {}, "umbel", "_UMBEL_COMPLETE")
    return {item.value for item in shell.get_completions(list(words[:-1]), words[-1])}
