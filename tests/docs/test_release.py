"""What a release says of its dependencies, from the locks alone; and what runs in CI is named by commit."""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from scripts import sbom
from umbel.version import VERSION

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ROOT / ".venv-release" / "bin"
# No request gets anywhere: both tools would go through this proxy.
OFFLINE = os.environ | dict.fromkeys(
    ["http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"], "http://127.0.0.1:9"
)
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    assert (TOOLS / "cyclonedx-py").exists(), (
        "`make test` makes .venv-release, or `scripts/setup release` alone"
    )
    target = tmp_path_factory.mktemp("release") / "umbel.cdx.json"
    command = [sys.executable, "-m", "scripts.sbom", str(target)]
    ran = subprocess.run(command, cwd=ROOT, env=OFFLINE, check=False, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    found: dict[str, Any] = json.loads(target.read_text())
    return found


def locked() -> dict[tuple[str, str], set[str]]:
    """By name and version, the hashes that are accepted."""
    found: dict[tuple[str, str], set[str]] = {}
    text = (ROOT / "requirements" / "extras.txt").read_text()
    for entry in re.split(r"\n(?=[a-z0-9])", text):
        if named := re.match(r"([a-z0-9.-]+)==(\S+)", entry):
            found[named[1], named[2]] = set(re.findall(r"sha256:([0-9a-f]{64})", entry))
    return found


def test_the_bill_of_materials_has_all_that_is_locked_with_its_hashes(document: dict[str, Any]) -> None:
    components = {(found["name"], found["version"]): found for found in document["components"]}
    wanted = locked()
    assert len(wanted) > 50 and wanted.keys() < components.keys()
    for name, hashes in wanted.items():
        (distribution,) = components[name]["externalReferences"]
        assert {accepted["content"] for accepted in distribution["hashes"]} == hashes, name
        assert components[name]["purl"] == f"pkg:pypi/{name[0]}@{name[1]}"


def test_it_names_the_release_and_the_scripts_in_the_package(document: dict[str, Any]) -> None:
    about = document["metadata"]["component"]
    assert (about["name"], about["version"], about["purl"]) == ("umbel", VERSION, f"pkg:pypi/umbel@{VERSION}")
    others = {found["name"] for found in document["components"]} - {name for name, _ in locked()}
    assert others == {"htmx.org", "uplot"}
    assert {name for name, *_ in sbom.SCRIPTS} == {path.name for path in sbom.VENDOR.glob("*.js")}
    (own,) = [entry for entry in document["dependencies"] if entry["ref"] == about["bom-ref"]]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    direct = {re.split(r"[\[><=]", line)[0] for line in project["dependencies"]}
    named = {found["bom-ref"]: found["name"] for found in document["components"]}
    assert direct | {"htmx.org", "uplot"} <= {named[ref] for ref in own["dependsOn"]}
    assert "timestamp" not in document["metadata"] and "serialNumber" not in document  # the same each time


def test_it_is_valid_cyclonedx(document: dict[str, Any]) -> None:
    check = (
        "import sys; from cyclonedx.schema import SchemaVersion; "
        "from cyclonedx.validation.json import JsonStrictValidator; "
        "sys.exit(str(JsonStrictValidator(SchemaVersion.V1_6).validate_str(sys.stdin.read()) or '') or 0)"
    )
    command = [str(TOOLS / "python"), "-c", check]
    text = json.dumps(document)
    ran = subprocess.run(command, input=text, env=OFFLINE, check=False, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    broken = text.replace('"type": "library"', '"type": "libary"', 1)
    ran = subprocess.run(command, input=broken, env=OFFLINE, check=False, capture_output=True, text=True)
    assert ran.returncode != 0


def test_every_extra_is_locked() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    names = {name for name, _ in locked()}
    for extra, requirements in extras.items():
        wanted = {re.split(r"[\[><=;]", line)[0] for line in requirements} - {"umbel"}
        assert wanted <= names, extra


def test_what_is_locked_can_be_audited() -> None:
    """Without the question itself, which needs the network: `make audit`."""
    (line,) = re.findall(r"^\t@(\S*pip-audit .*) \$\(ARGS\)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    command = [*line.split(), "--dry-run"]
    ran = subprocess.run(command, cwd=ROOT, env=OFFLINE, check=False, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert f"would have audited {len({name for name, _ in locked()})} packages" in ran.stderr


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_actions_are_named_by_commit(workflow: Path) -> None:
    jobs = yaml.safe_load(workflow.read_text())["jobs"].values()
    used = [step["uses"] for job in jobs for step in job["steps"] if "uses" in step]
    assert used
    for action in used:
        assert re.fullmatch(r"[\w.-]+/[\w./-]+@[0-9a-f]{40}", action), action
    noted = re.findall(r"uses: (\S+) # v\d+\.\d+\.\d+$", workflow.read_text(), re.MULTILINE)
    assert noted == used  # a reader sees the version
