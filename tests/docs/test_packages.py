"""The packages of a release: what is in them, and that a task runs from the wheel in a fresh environment."""

import re
import subprocess
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest
import yaml

from scripts import release
from scripts.links import ROOT, repository
from umbel.version import VERSION

Packages = tuple[Path, Path]


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Packages:
    return release.build(tmp_path_factory.mktemp("dist"))


def test_sdist_and_wheel_hold_what_git_tracks_and_nothing_else(packages: Packages) -> None:
    sdist, wheel = packages
    assert list(release.problems(sdist, wheel)) == []
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert "umbel/py.typed" in names
    assert any(name.endswith(".lua") for name in names)
    with tarfile.open(sdist) as archive:
        assert f"umbel-{VERSION}/CHANGELOG.md" in archive.getnames()


def test_a_file_too_many_and_one_too_few_are_named(packages: Packages, tmp_path: Path) -> None:
    sdist, wheel = packages
    other = tmp_path / wheel.name
    with zipfile.ZipFile(wheel) as archive, zipfile.ZipFile(other, "w") as changed:
        for name in archive.namelist():
            if name != "umbel/py.typed":
                changed.writestr(name, archive.read(name))
        changed.writestr("umbel/keys.pem", "")
    assert list(release.problems(sdist, other)) == [
        f"{wheel.name} contains umbel/keys.pem, which git does not track",
        f"{wheel.name} lacks umbel/py.typed",
    ]


def test_pypi_accepts_the_description(packages: Packages) -> None:
    command = [str(release.TWINE), "check", "--strict", *map(str, packages)]
    ran = subprocess.run(command, check=False, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_a_task_runs_from_the_wheel_alone(packages: Packages, tmp_path: Path) -> None:
    release.run_a_task(packages[1], tmp_path, libraries=Path(sysconfig.get_path("purelib")))


def test_a_tag_must_be_the_version_and_have_a_section() -> None:
    assert list(release.tag_problems(f"v{VERSION}")) == []
    assert list(release.tag_problems("v9.9.9")) == [
        f"the tag is v9.9.9, and src/umbel/version.py says {VERSION}",
        "CHANGELOG.md has no section for 9.9.9",
    ]


def test_the_notes_of_a_release_are_its_section_with_links_that_hold_elsewhere() -> None:
    notes = release.notes("v0.3.0")
    assert notes.startswith("### ") and "## [" not in notes and "[0.2.0]:" not in notes
    links = re.findall(r"\]\((.+?)\)", notes)
    assert links and all(link.startswith(f"{repository()}/blob/v0.3.0/docs/") for link in links)


def test_only_jobs_that_run_no_code_of_the_tree_may_publish() -> None:
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())["jobs"]
    writing = {name for name, job in jobs.items() if "write" in job.get("permissions", {}).values()}
    assert writing == {"publish", "release"}
    for name in writing:
        ran = "\n".join(step.get("run", "") for step in jobs[name]["steps"])
        assert "make" not in ran and "scripts" not in ran, name
