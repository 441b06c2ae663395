"""Build and check the packages of a release, as the release workflow does for a tag (`make dist`).

    python -m scripts.release [vX.Y.Z]          builds dist/, checks the packages, runs a task from the wheel
    python -m scripts.release --notes vX.Y.Z    prints that version's section of the changelog

The wheel is built from the sdist, so that a missing file in the sdist is detected. A package with a file
that git does not track is refused.
"""

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

from scripts.links import OTHER_SITE, ROOT, repository
from umbel.version import VERSION

TWINE = ROOT / ".venv-release" / "bin" / "twine"
CHANGELOG = ROOT / "CHANGELOG.md"
MADE_WHEEL = {"METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE"}
MADE_SDIST = {"PKG-INFO", "pyproject.toml", ".gitignore"}
RELATIVE_LINK = re.compile(r"(?<=\]\()([^)\s]+)(?=\))")
TASKS = """from umbel import App

app = App("tried")


@app.task
def add(x: int, y: int) -> int:
    return x + y
"""
START_S, STOP_S = 60, 60


def build(target: Path) -> tuple[Path, Path]:
    """Build the sdist from the tree and the wheel from the sdist; return both paths."""
    _hatchling("sdist", target, tree=ROOT)
    (sdist,) = target.glob("umbel-*.tar.gz")
    with tempfile.TemporaryDirectory() as unpacked:
        with tarfile.open(sdist) as archive:
            archive.extractall(unpacked, filter="data")
        _hatchling("wheel", target, tree=Path(unpacked) / f"umbel-{VERSION}")
    (wheel,) = target.glob("umbel-*.whl")
    return sdist, wheel


def _hatchling(kind: str, target: Path, *, tree: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "--target", kind, "--directory", str(target)]
    _run(command, folder=tree)


def problems(sdist: Path, wheel: Path) -> Iterator[str]:
    """Yield a sentence for each file that a package lacks or should not contain."""
    ours = _tracked()
    about = f"umbel-{VERSION}.dist-info/"
    wanted = {path.removeprefix("src/") for path in ours if path.startswith("src/umbel/")}
    with zipfile.ZipFile(wheel) as archive:
        yield from _differences(
            wheel, set(archive.namelist()), wanted | {about + name for name in MADE_WHEEL}
        )
    build_settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    included = [path.removeprefix("/") for path in build_settings["targets"]["sdist"]["include"]]
    wanted = {path for path in ours if any(path == name or path.startswith(f"{name}/") for name in included)}
    with tarfile.open(sdist) as archive:
        found = {member.name.partition("/")[2] for member in archive if member.isfile()}
    yield from _differences(sdist, found, wanted | MADE_SDIST)


def _tracked() -> set[str]:
    """Return the files that git tracks, and new files that it does not ignore."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = _run(command, folder=ROOT).split("\0")
    return {path for path in listed if path and (ROOT / path).exists()}


def _differences(package: Path, found: set[str], wanted: set[str]) -> Iterator[str]:
    yield from (
        f"{package.name} contains {path}, which git does not track" for path in sorted(found - wanted)
    )
    yield from (f"{package.name} lacks {path}" for path in sorted(wanted - found))


def tag_problems(tag: str) -> Iterator[str]:
    """Yield the reasons why this tag does not fit the version and the changelog."""
    if tag != f"v{VERSION}":
        yield f"the tag is {tag}, and src/umbel/version.py says {VERSION}"
    if not notes(tag):
        yield f"CHANGELOG.md has no section for {tag.removeprefix('v')}"


def notes(tag: str) -> str:
    """Return the changelog's section of a version, with absolute links; "" if there is none."""
    version = re.escape(tag.removeprefix("v"))
    section = re.search(
        rf"^## \[{version}\] - .+?\n(.*?)(?=^## |^\[[^\]]+\]: |\Z)",
        CHANGELOG.read_text(encoding="utf-8"),
        re.DOTALL | re.MULTILINE,
    )
    return (
        "" if section is None else RELATIVE_LINK.sub(lambda link: _absolute(link[1], tag), section[1].strip())
    )


def _absolute(target: str, tag: str) -> str:
    return target if OTHER_SITE.match(target) else f"{repository()}/blob/{tag}/{target}"


def run_a_task(wheel: Path, place: Path, *, libraries: Path | None = None) -> None:
    """Install the wheel into a fresh environment in `place`, and run a task with a worker from there.

    Its dependencies are the locked ones, or those in the folder `libraries`, which needs no network.
    """
    environment, project = place / "env", place / "project"
    _run([sys.executable, "-m", "venv", "--without-pip", str(environment)], folder=place)
    python = environment / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps"]
    if libraries is None:
        locked = str(ROOT / "requirements" / "runtime.txt")
        _run([*install, "--require-hashes", "-r", locked], folder=place)
    else:
        (packages,) = environment.glob("lib/python*/site-packages")
        (packages / "libraries.pth").write_text(f"{libraries}\n")
    _run([*install, "--no-index", str(wheel)], folder=place)

    project.mkdir()
    (project / "tasks.py").write_text(TASKS)
    umbel = str(environment / "bin" / "umbel")
    where = _run([str(python), "-c", "import umbel; print(umbel.__file__)"], folder=project)
    _expect(where.startswith(str(environment)), f"umbel was imported from {where}")
    version = _run([umbel, "--version"], folder=project)
    _expect(version.split()[-1] == VERSION, f"umbel --version printed {version!r}")
    worker = subprocess.Popen(
        [umbel, "worker", "-A", "tasks", "-c", "1"], cwd=project, env=_environment(project)
    )
    try:
        answer = _run(
            [umbel, "call", "-A", "tasks", "tasks.add", "2", "3", "--wait", str(START_S)], folder=project
        )
        _expect(answer.strip() == "5", f"the task returned {answer!r}")
    finally:
        worker.send_signal(signal.SIGTERM)
        code = worker.wait(STOP_S)
    _expect(code == 0, f"the worker exited with {code}")


def _environment(project: Path) -> dict[str, str]:
    """Return the environment of a user, without variables of Umbel or Python."""
    others = {name: value for name, value in os.environ.items() if not name.startswith(("UMBEL_", "PYTHON"))}
    return others | {"UMBEL_RUN_DIR": str(project / "run"), "PYTHONDONTWRITEBYTECODE": "1"}


def _run(command: list[str], *, folder: Path) -> str:
    ran = subprocess.run(
        command, cwd=folder, env=_environment(folder), check=False, capture_output=True, text=True
    )
    _expect(
        ran.returncode == 0, f"{' '.join(command)} exited with {ran.returncode}:\n{ran.stdout}{ran.stderr}"
    )
    return ran.stdout.strip()


def _expect(is_so: bool, otherwise: str) -> None:
    if not is_so:
        sys.exit(f"release: {otherwise}")


def main() -> None:
    """Build the packages, check them and run a task from the wheel; or print the notes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tag", nargs="?", help="must match the version in src/umbel/version.py")
    parser.add_argument("--notes", action="store_true", help="print the changelog's section of the tag")
    options = parser.parse_args()
    tag = options.tag or f"v{VERSION}"
    if options.notes:
        print(notes(tag))
        return
    dist = ROOT / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    sdist, wheel = build(dist)
    found = [*(tag_problems(tag) if options.tag else ()), *problems(sdist, wheel)]
    _expect(not found, "\n".join(found))
    _run([str(TWINE), "check", "--strict", str(sdist), str(wheel)], folder=ROOT)
    with tempfile.TemporaryDirectory() as place:
        run_a_task(wheel, Path(place))
    print(f"{sdist.relative_to(ROOT)}\n{wheel.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
