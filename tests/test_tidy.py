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
FILE_LINES_MAX, FILE_LINES_MIN = 800, 60
FUNCTION_LINES_MAX = 60
BANNED_NAMES = {"utils", "helpers", "common", "base", "manager"}

# Tests wait with tests/waiting.py; these are tasks of green pools, and how they wait is the point.
MAY_SLEEP = {
    "tests/waiting.py",
    "tests/scenarios/green_tasks.py",
    "tests/scenarios/greenlet_tasks.py",
    "tests/web/web_tasks.py",
}

# Files below FILE_LINES_MIN lines, with the reason why each stands alone.
SHORT_BECAUSE = {
    "src/umbel/__main__.py": "the entry point of `python -m umbel`",
    "src/umbel/version.py": "the build reads the version from it",
    "src/umbel/chance.py": "loaded everywhere; apart from Python's `random`, whose numbers are the project's",
    "src/umbel/app/running/async_tracer.py": "with asyncio, which few children need",
    "src/umbel/backoff.py": "brokers, clients and workers load it, and little else",
    "src/umbel/backends/registry.py": "the interface may not know the backends, nor they one another",
    "src/umbel/cli/exits.py": "`umbel health` loads it, and little else",
    "src/umbel/cli/lazy.py": "loaded before it is known which command is called",
    "src/umbel/cli/history/group.py": "the group, which loads none of its commands",
    "src/umbel/contrib/django/apps.py": "Django looks for it here",
    "src/umbel/contrib/django/management/commands/umbel.py": "Django looks for it here",
    "src/umbel/coordination/election_context.py": "public: what the handler of an election is given",
    "src/umbel/demo/celery_shop.py": "a Celery app, which loads Celery; the demo does not",
    "src/umbel/pools/prefork/child_guard.py": "it starts the script that must load nothing",
    "src/umbel/web/action_events.py": "`umbel mark` loads it, without the dashboard",
    "src/umbel/worker/steps/outbox.py": "every worker loads it; the relay only those that have an outbox",
    "src/umbel/worker/steps/recorder.py": "a step; the process that it starts is another subject",
}

# What came from outside is escaped there, part by part, so that it stands for itself.
MAY_BUILD_PATTERNS = {"src/umbel/brokers/amqp/layouts.py"}

# Coinages that readers had to learn; the glossary of `docs/architecture.md` has the words instead.
PRIVATE_WORD = re.compile(
    r"\b(?:told(?! apart| from)|heard|anew|whoever|of (?:its|their) own|what is left|tries on|nobody is)\b",
    re.IGNORECASE,
)

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
TEXT = {".py", ".md", ".txt", ".toml", ".lua", ".html", ".js", ".mjs", ".css", ".ini", ".yml", ".yaml", ""}
BLANKET_IGNORE = re.compile(r"type:\s*ignore(?!\[)")
LOCK_LINE = re.compile(r"#.*|[a-z0-9.-]+==\S+( ; .+)? \\|    --hash=sha256:[0-9a-f]{64}( \\)?|    # .*")


@dataclass(frozen=True)
class Source:
    path: str
    text: str

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """The module comes first."""
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


def short_files(source: Source) -> Iterator[Finding]:
    if len(source.lines) < FILE_LINES_MIN and not source.path.endswith("__init__.py"):
        yield 1, f"{len(source.lines)} lines: a subject needs more, or a reason in SHORT_BECAUSE"


def undocumented(source: Source) -> Iterator[Finding]:
    """Public modules, classes, functions and methods without a docstring; setters and overloads need none."""
    todo = [source.nodes[0]]
    while todo:
        node = todo.pop()
        for child in getattr(node, "body", []):
            if isinstance(child, ast.If | ast.Try):
                todo.append(child)
            elif isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                decorators = " ".join(map(ast.unparse, child.decorator_list))
                if child.name.startswith("_") or "overload" in decorators or ".setter" in decorators:
                    continue
                if ast.get_docstring(child) is None:
                    yield child.lineno, f"{child.name} has no docstring"
                if isinstance(child, ast.ClassDef):
                    todo.append(child)


def nameless_loops(source: Source) -> Iterator[Finding]:
    for node in source.nodes:
        match node:
            case ast.Name(id="one", ctx=ast.Store()) | ast.arg(arg="one"):
                yield node.lineno, "'one' says nothing of what it is: use the noun"


def private_words(source: Source) -> Iterator[Finding]:
    """In comments, docstrings, log lines and errors. What stands in backticks is a name, not prose."""
    if not PRIVATE_WORD.search(source.text):
        return
    prose = [
        (token.start[0], token.string)
        for token in tokenize.generate_tokens(io.StringIO(source.text).readline)
        if token.type == tokenize.COMMENT
    ]
    for node in source.nodes:
        match node:
            case ast.Expr(value=ast.Constant(value=str() as text)):
                prose.append((node.lineno, text))
            case ast.Raise(exc=ast.Call(args=given)):
                prose += [(node.lineno, text) for text in _texts_in(given)]
            case ast.Call(func=ast.Attribute(value=ast.Name(id="log")), args=given):
                prose += [(node.lineno, text) for text in _texts_in(given)]
    for line, text in prose:
        if found := PRIVATE_WORD.search(re.sub("`[^`]*`", "", text)):
            yield line, f"'{found[0]}': write the word that people search for"


def _texts_in(arguments: Iterable[ast.expr]) -> Iterator[str]:
    for argument in arguments:
        for node in ast.walk(argument):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def nameless_places(source: Source) -> Iterator[Finding]:
    for part in Path(source.path).with_suffix("").parts:
        if part in BANNED_NAMES:
            yield 1, f"'{part}' names code that has not found its place yet"


def broad_excepts(source: Source) -> Iterator[Finding]:
    """Whose code may raise anything is said in a comment on the line: a task, a hook, a handler of users."""
    for node in source.nodes:
        match node:
            case ast.ExceptHandler(type=None):
                yield node.lineno, "a bare except catches everything"
            case ast.ExceptHandler(body=[*_, ast.Raise(exc=None)]):
                continue  # tidies up and lets it pass on
            case ast.ExceptHandler(type=ast.expr() as caught) if _names_everything(caught):
                if "  # " not in source.lines[node.lineno - 1]:
                    yield node.lineno, f"'except {ast.unparse(caught)}': say in a comment whose error it is"
            case ast.Call(func=ast.expr() as called, args=args) if _ends_with(called, "suppress"):
                if any(map(_names_everything, args)) and "  # " not in source.lines[node.lineno - 1]:
                    yield node.lineno, "suppress() of everything: say in a comment whose error it is"


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


def patterns_from_outside(source: Source) -> Iterator[Finding]:
    """Python's `re` may take years over a pattern, so it gets only those that are written in the code."""
    for node in source.nodes:
        match node:
            case ast.Import(names=names) if any(name.name == "fnmatch" for name in names):
                yield node.lineno, "fnmatch is built on re: use umbel.patterns"
            case ast.ImportFrom(module="fnmatch" | "re" as module):
                yield node.lineno, f"from {module} import …: use umbel.patterns, or write re.name"
            case ast.Call(func=ast.Attribute(value=ast.Name(id="re"), attr=name), args=[pattern, *_]):
                if name != "escape" and not _is_written_here(pattern):
                    yield node.lineno, f"re.{name}({ast.unparse(pattern)[:60]}): use umbel.patterns"
            case ast.Call(func=ast.Attribute(value=ast.Name(id="re"), attr=name), args=[]):
                yield node.lineno, f"re.{name}() with a named pattern: give it by its place"


def _is_written_here(pattern: ast.expr) -> bool:
    """Whether a pattern is made of literals, constants of a module, numbers, and what they make."""
    match pattern:
        case ast.Constant():
            return True
        case ast.Name(id=name) | ast.Attribute(value=ast.Name(id=name), attr="pattern"):
            return name.isupper()
        case ast.JoinedStr(values=parts) | ast.Tuple(elts=parts):
            return all(map(_is_written_here, parts))
        case ast.FormattedValue(value=value) | ast.Starred(value=value):
            return _is_written_here(value)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _is_written_here(left) and _is_written_here(right)
        case ast.BinOp(left=ast.Constant(value=str() | bytes() as text), op=ast.Mod()):
            return "%s" not in str(text) and "%b" not in str(text)
        case ast.Call(func=ast.Attribute(value=ast.Name(id="re"), attr="escape")):
            return True
        case ast.Call(func=ast.Name(id=name), args=parts) if name.startswith("_"):  # of the file's own
            return all(map(_is_written_here, parts))
    return False


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
    """Files and folders that import one another, at every depth, by imports that run.

    Two modules are compared as children of the folder that holds both: where `a/b/x.py` imports `a/c/y.py`,
    `a/b` imports `a/c`. Imports for types alone are free.
    """
    modules = {_module_of(source.path): source for source in sources}
    graphs: dict[str, dict[str, set[str]]] = {}
    for name, source in modules.items():
        for imported in _imported(_nodes_that_run(source), modules) - {name}:
            folder, here, there = _children(source.path, modules[imported].path)
            graphs.setdefault(folder, {}).setdefault(here, set()).add(there)
    return [line for folder, graph in sorted(graphs.items()) for line in _in_a_circle(folder, graph)]


def _nodes_that_run(source: Source) -> Iterator[ast.AST]:
    todo = [source.nodes[0]]
    while todo:
        node = todo.pop()
        if not (isinstance(node, ast.If) and _ends_with(node.test, "TYPE_CHECKING")):
            yield node
            todo.extend(ast.iter_child_nodes(node))


def _children(path: str, other: str) -> tuple[str, str, str]:
    """The folder that holds both files, and its children that lead to them."""
    here, there = path.split("/"), other.split("/")
    depth = next(place for place, (a, b) in enumerate(zip(here, there, strict=False)) if a != b)
    return "/".join(here[:depth]), here[depth], there[depth]


def _in_a_circle(folder: str, graph: dict[str, set[str]]) -> list[str]:
    # What imports nothing that remains is in no circle, nor is what nothing that remains imports.
    rest = {child: set(imported) for child, imported in graph.items()}
    while True:
        wanted = set[str]().union(*rest.values())
        staying = {child for child, imported in rest.items() if imported & rest.keys() and child in wanted}
        if len(staying) == len(rest):
            return sorted(f"{folder}: {child} imports {', '.join(sorted(to))}" for child, to in rest.items())
        rest = {child: rest[child] & staying for child in staying}


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


def test_a_file_holds_a_subject() -> None:
    assert findings(short_files, python_in("src"), exempt=SHORT_BECAUSE) == []


def test_files_that_may_be_short_are() -> None:
    sources = [source for source in python_in("src") if source.path in SHORT_BECAUSE]
    assert [source.path for source in sources if not list(short_files(source))] == []
    assert {source.path for source in sources} == set(SHORT_BECAUSE)


def test_everything_public_is_documented() -> None:
    assert findings(undocumented, python_in("src")) == []


def test_a_loop_variable_is_a_noun() -> None:
    assert findings(nameless_loops, python_in("src")) == []


def test_prose_has_no_private_words() -> None:
    assert findings(private_words, python_in("src")) == []


def test_a_function_fits_a_screen() -> None:
    assert findings(long_functions, python_in("src")) == []


def test_a_file_is_named_after_something_in_the_domain() -> None:
    assert findings(nameless_places, python_in("src", "tests", "benchmarks", "examples")) == []


def test_where_everything_is_caught_a_comment_says_whose_error_it_is() -> None:
    assert findings(broad_excepts, python_in("src")) == []


def test_tests_wait_for_conditions_and_never_sleep() -> None:
    assert findings(sleeps, python_in("tests"), exempt=MAY_SLEEP) == []


def test_no_pattern_from_outside_is_handed_to_re() -> None:
    assert findings(patterns_from_outside, python_in("src"), exempt=MAY_BUILD_PATTERNS) == []


def test_who_may_build_patterns_does() -> None:
    sources = [source for source in python_in("src") if source.path in MAY_BUILD_PATTERNS]
    assert [source.path for source in sources if not list(patterns_from_outside(source))] == []


def test_a_type_ignore_names_its_error() -> None:
    assert findings(blanket_type_ignores, python_in("src", "tests", "benchmarks", "examples")) == []


def test_pure_packages_import_no_libraries() -> None:
    assert findings(libraries_in_pure_code, python_in("src")) == []


def test_no_files_and_no_folders_import_one_another_in_a_circle() -> None:
    assert circles(python_in("src")) == []


@pytest.mark.parametrize(
    "back",
    ["from umbel.a import f", "from umbel import a", "def f():\n    import umbel.a"],
)
def test_a_circle_of_files_is_found_however_it_is_closed(back: str) -> None:
    texts = {"a": "from umbel.b import x", "b": "from umbel.c import y", "above": "import umbel.a"}
    sources = [Source(f"src/umbel/{name}.py", text) for name, text in texts.items()]
    closed = [*sources, Source("src/umbel/c.py", back)]
    found = ["a.py imports b.py", "b.py imports c.py", "c.py imports a.py"]
    assert circles(closed) == [f"src/umbel: {line}" for line in found]
    assert circles([*sources, Source("src/umbel/c.py", "import os")]) == []


def test_a_circle_of_folders_is_found_where_no_file_is_in_one() -> None:
    texts = {
        "a/x.py": "from umbel.b.y import f",
        "b/y.py": "",
        "b/z.py": "def g():\n    from umbel.a.w import h",
        "a/w.py": "",
    }
    sources = [Source(f"src/umbel/{name}", text) for name, text in texts.items()]
    assert circles(sources) == ["src/umbel: a imports b", "src/umbel: b imports a"]
    below = [
        Source(f"src/umbel/deep/{name}", text.replace("umbel.", "umbel.deep."))
        for name, text in texts.items()
    ]
    assert circles(below) == ["src/umbel/deep: a imports b", "src/umbel/deep: b imports a"]


def test_an_import_for_types_closes_no_circle() -> None:
    back = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from umbel.a import A"
    sources = [Source("src/umbel/a.py", "from umbel.b import x"), Source("src/umbel/b.py", back)]
    assert circles(sources) == []


def test_nothing_names_a_place_on_somebodys_machine() -> None:
    assert findings(machine_paths, all_text()) == []


def test_locks_hold_pinned_versions_and_hashes_only() -> None:
    assert findings(loose_locks, map(_read, sorted((ROOT / "requirements").glob("*.txt")))) == []


CAUGHT: list[tuple[Rule, str, str]] = [
    (long_files, "src/umbel/a.py", "x = 1\n" * (FILE_LINES_MAX + 1)),
    (short_files, "src/umbel/a.py", "x = 1\n" * (FILE_LINES_MIN - 2)),
    (undocumented, "src/umbel/a.py", "class A:\n    def f(self):\n        pass\n"),
    (undocumented, "src/umbel/a.py", "if X:\n    async def f():\n        pass\n"),
    (nameless_loops, "src/umbel/a.py", "f(one.x for one in y)\n"),
    (nameless_loops, "src/umbel/a.py", "f(lambda one: one.x)\n"),
    (private_words, "src/umbel/a.py", "log.info('heard from nobody')\n"),
    (private_words, "src/umbel/a.py", "x = 1  # made anew\n"),
    (long_functions, "src/umbel/a.py", "async def f():\n" + "    x = 1\n" * FUNCTION_LINES_MAX),
    (nameless_places, "src/umbel/utils.py", ""),
    (nameless_places, "src/umbel/common/places.py", ""),
    (broad_excepts, "src/umbel/a.py", "try:\n    f()\nexcept:  # of a hook\n    pass\n"),
    (broad_excepts, "src/umbel/a.py", "try:\n    f()\nexcept Exception as error:\n    pass\n"),
    (broad_excepts, "src/umbel/a.py", "try:\n    f()\nexcept (OSError, builtins.BaseException):\n    pass\n"),
    (broad_excepts, "src/umbel/a.py", "with contextlib.suppress(Exception):\n    f()\n"),
    (sleeps, "tests/test_a.py", "time.sleep(1)\n"),
    (sleeps, "tests/test_a.py", "async def f():\n    await asyncio.sleep(0.1)\n"),
    (sleeps, "tests/test_a.py", "from time import sleep\n"),
    (patterns_from_outside, "src/umbel/a.py", "re.match(request.pattern, node)\n"),
    (patterns_from_outside, "src/umbel/a.py", "re.compile(f'a{pattern}')\n"),
    (patterns_from_outside, "src/umbel/a.py", "re.compile(_KNOWN + given)\n"),
    (patterns_from_outside, "src/umbel/a.py", "re.compile(pattern=given)\n"),
    (patterns_from_outside, "src/umbel/a.py", "re.sub('%s+' % given, '', text)\n"),
    (patterns_from_outside, "src/umbel/a.py", "from fnmatch import fnmatchcase\n"),
    (patterns_from_outside, "src/umbel/a.py", "from re import match\n"),
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
    (short_files, "src/umbel/a/__init__.py", "x = 1\n"),
    (undocumented, "src/umbel/a.py", "def _f():\n    pass\n@x.setter\ndef f(self, x):\n    pass\n"),
    (nameless_loops, "src/umbel/a.py", "f(row.one for row in y)\n"),
    (private_words, "src/umbel/a.py", "told = 1  # of a message\n"),
    (long_functions, "src/umbel/a.py", "def f():\n" + "    x = 1\n" * (FUNCTION_LINES_MAX - 1)),
    (nameless_places, "src/umbel/brokers/baseline.py", ""),
    (broad_excepts, "src/umbel/a.py", "try:\n    f()\nexcept (OSError, MyException):\n    pass\n"),
    (broad_excepts, "src/umbel/a.py", "try:\n    f()\nexcept BaseException:\n    undo()\n    raise\n"),
    (broad_excepts, "src/umbel/a.py", "try:\n    f()\nexcept Exception:  # of a hook\n    pass\n"),
    (broad_excepts, "src/umbel/a.py", "with suppress(Exception):  # of a hook\n    f()\n"),
    (sleeps, "tests/test_a.py", "import threading\nthreading.Event().wait(0.01)\n"),
    (patterns_from_outside, "src/umbel/a.py", "re.compile(rf'a{_ID.pattern}' + re.escape(given) + _KNOWN)\n"),
    (patterns_from_outside, "src/umbel/a.py", "re.search(rb'[0-9]{%d,}' % (digits_max,), data)\n"),
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
