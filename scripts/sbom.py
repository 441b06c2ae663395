"""The bill of materials of a release (CycloneDX, JSON): `python -m scripts.sbom [FILE]`.

What `pip install 'umbel[…]'` may bring is taken by cyclonedx-py from `requirements/extras.txt`, with the
hashes that are locked there. The scripts of other people that the dashboard serves are in the package itself,
and are added. Nothing is asked of the network, and the same sources give the same file.
"""

import hashlib
import json
import re
import subprocess
import sys
import tomllib
from itertools import chain
from pathlib import Path
from typing import Any

from umbel.version import VERSION

ROOT = Path(__file__).resolve().parent.parent
TOOL = ROOT / ".venv-release" / "bin" / "cyclonedx-py"
LOCK = ROOT / "requirements" / "extras.txt"
VENDOR = ROOT / "src/umbel/web/pages/static/vendor"
# The file, its name at npm, its license, and where it says its version.
SCRIPTS = (
    ("htmx.min.js", "htmx.org", "0BSD", r'version:"([\d.]+)"'),
    ("uplot.min.js", "uplot", "MIT", r"uPlot \(v([\d.]+)\)"),
)
Fields = dict[str, Any]


def made() -> Fields:
    """The document."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found: Fields = json.loads(_from_lock())
    about = found["metadata"]["component"]
    about |= {"version": VERSION, "purl": f"pkg:pypi/{project['name']}@{VERSION}"}
    for component in found["components"]:
        component["description"] = component["description"].partition("--hash")[0].strip()
    vendored = [_script(*script) for script in SCRIPTS]
    direct = _direct(project)
    depends_on = [component["bom-ref"] for component in found["components"] if component["name"] in direct]
    found["components"] = sorted(
        [*found["components"], *vendored], key=lambda component: str(component["bom-ref"])
    )
    below = [entry for entry in found["dependencies"] if entry["ref"] != about["bom-ref"]]
    own = {
        "ref": about["bom-ref"],
        "dependsOn": sorted([*depends_on, *(script["bom-ref"] for script in vendored)]),
    }
    found["dependencies"] = [own, *below, *({"ref": script["bom-ref"]} for script in vendored)]
    return found


def _from_lock() -> str:
    options = [
        "--pyproject",
        "pyproject.toml",
        "--mc-type",
        "library",
        "--output-reproducible",
        "--of",
        "JSON",
    ]
    ran = subprocess.run(
        [TOOL, "requirements", *options, LOCK], cwd=ROOT, check=False, capture_output=True, text=True
    )
    if ran.returncode:
        raise SystemExit(f"sbom: cyclonedx-py failed:\n{ran.stderr}")
    return ran.stdout


def _script(name: str, package: str, license_id: str, version_pattern: str) -> Fields:
    """A script of other people, as it is served."""
    content = (VENDOR / name).read_bytes()
    version = re.search(version_pattern, content.decode())
    if version is None:
        raise SystemExit(f"sbom: {name} does not say its version; correct SCRIPTS in scripts/sbom.py")
    purl = f"pkg:npm/{package}@{version[1]}"
    return {
        "bom-ref": purl,
        "type": "library",
        "name": package,
        "version": version[1],
        "purl": purl,
        "description": f"in the package, as {(VENDOR / name).relative_to(ROOT / 'src')}",
        "hashes": [{"alg": "SHA-256", "content": hashlib.sha256(content).hexdigest()}],
        "licenses": [{"license": {"id": license_id, "acknowledgement": "declared"}}],
    }


def _direct(project: Fields) -> set[str]:
    """The names of what the project itself asks for."""
    wanted = [*project["dependencies"], *chain.from_iterable(project["optional-dependencies"].values())]
    return {re.split(r"[\[><=;! ]", requirement)[0].lower() for requirement in wanted}


def main(arguments: list[str]) -> None:
    target = Path(arguments[0]) if arguments else ROOT / "dist" / f"umbel-{VERSION}.cdx.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(made(), indent=1, sort_keys=True) + "\n")
    print(target)


if __name__ == "__main__":
    main(sys.argv[1:])
