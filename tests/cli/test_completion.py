"""The shell can complete commands and options, as docs/commands.md says."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


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


@pytest.mark.parametrize(
    ("words", "offered"),
    [(["inspe"], {"inspect"}), (["ping", "--t"], {"--timeout"}), (["revoke", "--u"], {"--undo"})],
)
def test_the_shell_is_offered_commands_and_options(
    tmp_path: Path, words: list[str], offered: set[str]
) -> None:
    assert set(complete(tmp_path, *words)) == offered
