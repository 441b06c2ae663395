"""The habits of this code that a linter does not know, as rules over its syntax trees.

A rule is a generator of findings in one source file. Each is proven below to catch what it
bans; a finding prints as `path:line what is wrong`.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FILE_LINES_MAX = 400
FUNCTION_LINES_MAX = 60
BANNED_NAMES = {"utils", "helpers", "common", "base", "manager"}

# The guards around what users wrote: their tasks and hooks, and the reprs of their values.
MAY_CATCH_EVERYTHING = {"src/umbel/pools/guard.py", "src/umbel/wire/foreign.py"}
# Tests wait with tests/waiting.py; these are tasks of green pools, and how they wait is the point.
MAY_SLEEP = {
    "tests/waiting.py",
    "tests/scenarios/green_tasks.py",
    "tests/scenarios/greenlet_tasks.py",
    "tests/web/web_tasks.py",
}

NEW_IN_PYTHON = {"annotationlib"}  # standard library that an older Python does not name

# What the pure packages may import beside the standard library and umbel itself.
PURE = {
    "protocol": set[str](),
    "events": {"msgspec"},
    "wire": {"msgspec", "pybase64"},
    "fold": {"numpy", "pyarrow"},
}

# A path that exists on one machine only, or a package index that only one machine can reach.
MACHINE_PATH = re.compile(r"(?<![\w.~$}])/(?:(?:root|work)/|(?:home|Users)/\w)|file:///(?!srv/|…)")
NOT_OURS = {".git", "build", "dist", "lake", "__pycache__", ".hypothesis"}
TEXT = {".py", ".md", ".txt", ".toml", ".sql", ".lua", ".html", ".js", ".css", ".cfg", ".yml", ""}
BLANKET_IGNORE = re.compile(r"type:\s*ignore(?!\[)")
LOCK_LINE = re.compile(r"#.*|[a-z0-9.-]+==\S+( ; .+)? \\|    --hash=sha256:[0-9a-f]{64}( \\)?|    # .*")


@dataclass(frozen=True)
class Source:
    path: str
    text: str

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(ast.parse(self.text)))

    @property
    def lines(self) -> list[str]:
        return self.text.splitlines()


Finding = tuple[int, str]
Rule = Callable[[Source], Iterable[Finding]]


# ---- the rules -------------------------------------------------------------------------------------


def long_files(source: Source) -> Iterator[Finding]:
    if len(source.lines) > FILE_LINES_MAX:
        yield 1, f"{len(source.lines)} lines; {FILE_LINES_MAX} are read in one sitting"


def long_functions(source: Source) -> Iterator[Finding]:
    for node in source.nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > FUNCTION_LINES_MAX:
                yield node.lineno, f"{node.name}() has {length} lines; {FUNCTION_LINES_MAX} fit a screen"


def nameless_places(source: Source) -> Iterator[Finding]:
    for part in Path(source.path).with_suffix("").parts:
        if part in BANNED_NAMES:
            yield 1, f"'{part}' names code that has not found its place yet"


def broad_excepts(source: Source) -> Iterator[Finding]:
    for node in source.nodes:
        match node:
            case ast.ExceptHandler(type=None):
                yield node.lineno, "a bare except catches everything"
            case ast.ExceptHandler(body=[*_, ast.Raise(exc=None)]):
                continue  # tidies up and lets it pass on
            case ast.ExceptHandler(type=ast.expr() as caught) if _names_everything(caught):
                yield node.lineno, f"'except {ast.unparse(caught)}' catches everything"
            case ast.Call(func=ast.expr() as called, args=args) if _ends_with(called, "suppress"):
                if any(_names_everything(arg) for arg in args):
                    yield node.lineno, "suppress() of everything"


def sleeps(source: Source) -> Iterator[Finding]:
    if "sleep" not in source.text:
        return
    for node in source.nodes:
        match node:
            case ast.Attribute(value=ast.Name(id="time" | "asyncio" | "anyio" | "gevent"), attr="sleep"):
                yield node.lineno, f"{ast.unparse(node)}: wait for a condition with tests/waiting.py"
            case ast.ImportFrom(module="time" | "asyncio" | "anyio" | "gevent", names=names):
                if any(name.name == "sleep" for name in names):
                    yield node.lineno, "an imported sleep: wait for a condition with tests/waiting.py"


def blanket_type_ignores(source: Source) -> Iterator[Finding]:
    if not BLANKET_IGNORE.search(source.text):  # taking it apart is slow, and few have one
        return
    for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
        if token.type == tokenize.COMMENT and BLANKET_IGNORE.search(token.string):
            yield token.start[0], "a type: ignore that does not say which error it ignores"


def libraries_in_pure_code(source: Source) -> Iterator[Finding]:
    package = source.path.removeprefix("src/umbel/").split("/")[0]
    if package not in PURE:
        return
    known = sys.stdlib_module_names | NEW_IN_PYTHON | {"umbel"} | PURE[package]
    for node in source.nodes:
        match node:
            case ast.Import(names=names):
                modules = [name.name for name in names]
            case ast.ImportFrom(module=str(module), level=0):
                modules = [module]
            case _:
                continue
        for module in modules:
            if module.split(".")[0] not in known:
                yield node.lineno, f"{package} is pure and imports {module}"


def machine_paths(source: Source) -> Iterator[Finding]:
    for number, line in enumerate(source.lines, start=1):
        if found := MACHINE_PATH.search(line):
            yield number, f"'{found[0]}' is a place on somebody's machine"


def loose_locks(source: Source) -> Iterator[Finding]:
    for number, line in enumerate(source.lines, start=1):
        if not LOCK_LINE.fullmatch(line) or "://" in line:
            yield number, f"'{line}' is neither a pinned version nor its hash"


def _names_everything(caught: ast.expr) -> bool:
    parts = caught.elts if isinstance(caught, ast.Tuple) else [caught]
    return any(_ends_with(part, "Exception") or _ends_with(part, "BaseException") for part in parts)


def _ends_with(expression: ast.expr, name: str) -> bool:
    match expression:
        case ast.Name(id=last) | ast.Attribute(attr=last):
            return last == name
    return False


def circles(sources: Iterable[Source]) -> list[str]:
    """Modules that import one another, by whatever way: also inside functions and for types alone."""
    modules = {_module_of(source.path): source for source in sources}
    left = {name: _imported(source.nodes, modules) - {name} for name, source in modules.items()}
    # Who imports nobody that is left is in no circle, nor is who is imported by nobody that is left.
    while True:
        wanted = set[str]().union(*left.values())
        kept = {name for name, imported in left.items() if imported and name in wanted}
        if len(kept) == len(left):
            return sorted(f"{name} imports {', '.join(sorted(imported))}" for name, imported in left.items())
        left = {name: left[name] & kept for name in kept}


def _module_of(path: str) -> str:
    return path.removeprefix("src/").removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _imported(nodes: Iterable[ast.AST], known: Collection[str]) -> set[str]:
    found = set[str]()
    for node in nodes:
        match node:
            case ast.Import(names=names):
                found |= {name.name for name in names}
            case ast.ImportFrom(module=str(module), names=names):
                full = {name.name: f"{module}.{name.name}" for name in names}
                found |= {full[name] if full[name] in known else module for name in full}
    return found & set(known)


# ---- what they are applied to ----------------------------------------------------------------------


def python_in(*folders: str) -> list[Source]:
    return [_read(path) for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def all_text() -> list[Source]:
    return [
        _read(path)
        for path in sorted(_ours(ROOT))
        if path.suffix in TEXT and path != Path(__file__).resolve()
    ]


def _ours(folder: Path) -> Iterator[Path]:
    for path in folder.iterdir():  # `.git` is a file in a work tree beside the first
        if path.name in NOT_OURS or path.name.startswith(".venv") or path.name.endswith("_cache"):
            continue
        if path.is_file():
            yield path
        else:
            yield from _ours(path)


@cache
def _read(path: Path) -> Source:
    return Source(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8", errors="replace"))


def findings(rule: Rule, sources: Iterable[Source], *, exempt: Iterable[str] = ()) -> list[str]:
    return [
        f"{source.path}:{line} {what}"
        for source in sources
        if source.path not in exempt
        for line, what in rule(source)
    ]


# ---- the tests -------------------------------------------------------------------------------------


def test_a_file_is_read_in_one_sitting() -> None:
    assert findings(long_files, python_in("src")) == []


def test_a_function_fits_a_screen() -> None:
    assert findings(long_functions, python_in("src")) == []


def test_a_file_is_named_after_something_in_the_domain() -> None:
    assert findings(nameless_places, python_in("src", "tests", "benchmarks", "examples")) == []


def test_only_the_supervisor_and_the_guard_catch_everything() -> None:
    assert findings(broad_excepts, python_in("src"), exempt=MAY_CATCH_EVERYTHING) == []


def test_who_may_catch_everything_does() -> None:
    sources = [source for source in python_in("src") if source.path in MAY_CATCH_EVERYTHING]
    assert [source.path for source in sources if not list(broad_excepts(source))] == []


def test_tests_wait_for_conditions_and_never_sleep() -> None:
    assert findings(sleeps, python_in("tests"), exempt=MAY_SLEEP) == []


def test_a_type_ignore_names_its_error() -> None:
    assert findings(blanket_type_ignores, python_in("src", "tests", "benchmarks", "examples")) == []


def test_pure_packages_import_no_libraries() -> None:
    assert findings(libraries_in_pure_code, python_in("src")) == []


def test_no_modules_import_one_another_in_a_circle() -> None:
    assert circles(python_in("src")) == []


@pytest.mark.parametrize(
    "back",
    [
        "from umbel.a import f",
        "from umbel import a",
        "def f():\n    import umbel.a",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from umbel.a import A",
    ],
)
def test_a_circle_is_found_however_it_is_closed(back: str) -> None:
    texts = {"a": "from umbel.b import x", "b": "from umbel.c import y", "above": "import umbel.a"}
    sources = [Source(f"src/umbel/{name}.py", text) for name, text in texts.items()]
    closed = [*sources, Source("src/umbel/c.py", back)]
    found = ["umbel.a imports umbel.b", "umbel.b imports umbel.c", "umbel.c imports umbel.a"]
    assert circles(closed) == found
    assert circles([*sources, Source("src/umbel/c.py", "import os")]) == []


def test_nothing_names_a_place_on_somebodys_machine() -> None:
    assert findings(machine_paths, all_text()) == []


def test_locks_hold_pinned_versions_and_hashes_only() -> None:
    assert findings(loose_locks, map(_read, sorted((ROOT / "requirements").glob("*.txt")))) == []


CAUGHT: list[tuple[Rule, str, str]] = [
    (long_files, "src/umbel/a.py", "x = 1\n" * (FILE_LINES_MAX + 1)),
    (long_functions, "src/umbel/a.py", "async def f():\n" + "    x = 1\n" * FUNCTION_LINES_MAX),
    (nameless_places, "src/umbel/utils.py", ""),
    (nameless_places, "src/umbel/common/places.py", ""),
    (broad_excepts, "src/umbel/a.py", "try:\n    f()\nexcept:\n    pass\n"),
    (broad_excepts, "src/umbel/a.py", "try:\n    f()\nexcept Exception as error:\n    pass\n"),
    (broad_excepts, "src/umbel/a.py", "try:\n    f()\nexcept (OSError, builtins.BaseException):\n    pass\n"),
    (broad_excepts, "src/umbel/a.py", "with contextlib.suppress(Exception):\n    f()\n"),
    (sleeps, "tests/test_a.py", "time.sleep(1)\n"),
    (sleeps, "tests/test_a.py", "async def f():\n    await asyncio.sleep(0.1)\n"),
    (sleeps, "tests/test_a.py", "from time import sleep\n"),
    (blanket_type_ignores, "src/umbel/a.py", "x: int = ''  # type: " + "ignore\n"),
    (libraries_in_pure_code, "src/umbel/protocol/a.py", "import msgspec\n"),
    (libraries_in_pure_code, "src/umbel/wire/a.py", "from redis.asyncio import Redis\n"),
    (machine_paths, "docs/a.md", "cd /home/ada/umbel\n"),
    (machine_paths, "docs/a.md", "see file:///var/simple\n"),
    (loose_locks, "requirements/a.txt", "--index-url https://pypi.example/simple\n"),
    (loose_locks, "requirements/a.txt", "click>=8\n"),
]

LET_PASS: list[tuple[Rule, str, str]] = [
    (long_files, "src/umbel/a.py", "x = 1\n" * FILE_LINES_MAX),
    (long_functions, "src/umbel/a.py", "def f():\n" + "    x = 1\n" * (FUNCTION_LINES_MAX - 1)),
    (nameless_places, "src/umbel/brokers/baseline.py", ""),
    (broad_excepts, "src/umbel/a.py", "try:\n    f()\nexcept (OSError, MyException):\n    pass\n"),
    (broad_excepts, "src/umbel/a.py", "try:\n    f()\nexcept BaseException:\n    undo()\n    raise\n"),
    (sleeps, "tests/test_a.py", "import threading\nthreading.Event().wait(0.01)\n"),
    (blanket_type_ignores, "src/umbel/a.py", "x: int = ''  # type: ignore[assignment]\n"),
    (libraries_in_pure_code, "src/umbel/wire/a.py", "import json, msgspec\nfrom umbel.events import types\n"),
    (libraries_in_pure_code, "src/umbel/brokers/a.py", "import redis\n"),
    (machine_paths, "docs/a.md", "sqlite:///path.db, ~/work/umbel, https://example.com/home/x\n"),
    (
        loose_locks,
        "requirements/a.txt",
        f"a-b==1.0 ; sys_platform == 'win32' \\\n    --hash=sha256:{'0' * 64}\n",
    ),
]


@pytest.mark.parametrize(("rule", "path", "text"), CAUGHT)
def test_a_rule_catches_what_it_bans(rule: Rule, path: str, text: str) -> None:
    assert findings(rule, [Source(path, text)])


@pytest.mark.parametrize(("rule", "path", "text"), LET_PASS)
def test_a_rule_lets_the_rest_pass(rule: Rule, path: str, text: str) -> None:
    assert findings(rule, [Source(path, text)]) == []
