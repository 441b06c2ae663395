"""The page of the public API, from the docstrings of the package, as plain Markdown.

Read from the source text rather than from live objects: annotations then look as they were written, on
every Python. A class is found by its public name, so the page does not change when a file moves.
"""

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import umbel
import umbel.testing

HEAD = """# API

<!-- made by `make docs`; do not edit -->

What `import umbel` and `umbel.testing` offer. Everything else in the package is internal and may change at
any time. A method without a sentence does what its name and types say.
"""
TESTING = """## umbel.testing

For tests of your project: [testing](testing.md) shows how the fixtures are used that give these.
"""
# Without an underscore for the other parts of Umbel; not for users.
INTERNAL = {
    "App": {
        *("send", "asend", "send_unique", "asend_unique", "send_deadline", "publish", "apublish"),
        *("producer", "backend", "clients", "broker_settings", "eager_runner", "eager_backend"),
        *("find_task", "all_tasks", "task_queues", "periodic_tasks", "start_child", "stop_child", "revoke"),
    },
    "Clock": {"used_by", "close"},
    "EmbeddedWorker": {"next_due", "catch_up"},
    "SentCall": {"is_of", "matches", "unique_key"},
    "Signature": {
        *("prepare", "prepare_as", "handle", "absorb", "as_steps", "join_group", "is_member", "join_chord"),
        *("parts", "app", "to_map", "linked", "take_links", "is_unique", "sends_nothing"),
    },
    "GroupResult": {"save_in", "arranged"},
    "ElectionContext": {"prolong", "cancel"},
    "Control": {"close"},
}
Function = ast.FunctionDef | ast.AsyncFunctionDef


def page() -> str:
    lines = [HEAD]
    lines += _names(umbel)
    lines += _class("Control", type(umbel.App("api").control), "What `app.control` is.")
    lines += _errors()
    lines += [TESTING, *_names(umbel.testing)]
    return "\n".join(lines).rstrip() + "\n"


def _names(module: ModuleType) -> list[str]:
    lines: list[str] = []
    for name in module.__all__:
        value = getattr(module, name)
        if inspect.isclass(value):
            lines += _class(name, value)
        elif inspect.isfunction(value):
            lines += _function(name, _source(value), name)
    return lines


def _class(name: str, value: type, about: str = "") -> list[str]:
    node = _source(value)
    assert isinstance(node, ast.ClassDef)
    made = textwrap.indent(_broken(f"def __init__{_constructor(value)} -> None: ..."), "    ")
    lines = [f"## {name}", "", "```python", f"class {name}:", made, "```", ""]
    lines += [part for part in (about, _text(node)) if part]
    return [*lines, "", *_members(name, value)]


def _constructor(value: type) -> str:
    made = next((node for node in _methods(value) if node.name == "__init__"), None)
    return _parameters(made) if made else "(*args: Any)"


def _members(name: str, value: type) -> list[str]:
    lines: list[str] = []
    for node in _methods(value):
        if not node.name.startswith("_") and node.name not in INTERNAL.get(name, ()):
            lines += _function(f"{name}.{node.name}", node, node.name)
    return lines


def _function(title: str, node: ast.stmt, spelling: str) -> list[str]:
    assert isinstance(node, Function)
    level = "###" if "." in title else "##"
    if _is_property(node):
        shown = f"{spelling}: {_annotation(node.returns)}" if node.returns else spelling
    else:
        keyword = "async " if isinstance(node, ast.AsyncFunctionDef) else ""
        returns = f" -> {_annotation(node.returns)}" if node.returns else ""
        shown = _broken(f"{keyword}def {spelling}{_parameters(node)}{returns}: ...")
    text = _text(node)
    return [f"{level} {title}", "", "```python", shown, "```", "", *([text, ""] if text else [])]


def _methods(value: type) -> Iterator[Function]:
    """The methods of a class and of those it is made of, each once; of overloads the one with the code."""
    seen: set[str] = set()
    for kind in value.__mro__:
        if not kind.__module__.startswith("umbel."):
            continue
        node = _source(kind)
        assert isinstance(node, ast.ClassDef)
        found = {one.name: one for one in node.body if isinstance(one, Function) and one.name not in seen}
        seen |= set(found)
        yield from found.values()


def _parameters(node: Function) -> str:
    arguments = node.args
    for first in (arguments.posonlyargs, arguments.args):
        if first and first[0].arg in {"self", "cls"}:
            del first[0]
            break
    for one in (
        *arguments.posonlyargs,
        *arguments.args,
        *arguments.kwonlyargs,
        arguments.vararg,
        arguments.kwarg,
    ):
        if one is not None and isinstance(one.annotation, ast.Constant):
            one.annotation = ast.parse(str(one.annotation.value), mode="eval").body
    return f"({', '.join(map(_spaced, _split(ast.unparse(arguments))))})"


def _spaced(parameter: str) -> str:
    """`x: int = 1`, as it is written; ast leaves the spaces out."""
    name, equals, default = parameter.partition("=")
    return f"{name} = {default}" if equals and ":" in name else parameter


def _annotation(node: ast.expr) -> str:
    return str(node.value) if isinstance(node, ast.Constant) and node.value else ast.unparse(node)


def _is_property(node: Function) -> bool:
    return any(re.search(r"property$", ast.unparse(decorator)) for decorator in node.decorator_list)


def _source(value: Any) -> ast.stmt:
    return ast.parse(textwrap.dedent(inspect.getsource(value))).body[0]


def _text(node: Function | ast.ClassDef) -> str:
    return ast.get_docstring(node) or ""


def _broken(text: str) -> str:
    """A signature, broken at its parameters where it is long, so that a phone can show it."""
    if len(text) > 76:
        head, _, rest = text.partition("(")
        inner, _, tail = rest.rpartition(") -> ") if ") -> " in rest else rest.rpartition("): ...")
        closing = f") -> {tail}" if ") -> " in rest else "): ..."
        text = f"{head}(\n" + "".join(f"    {part},\n" for part in _split(inner) if part) + closing
    return text.replace("'", '"')


def _split(parameters: str) -> list[str]:
    """At commas that are not inside brackets."""
    parts, depth, start = [], 0, 0
    for place, character in enumerate(parameters):
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            parts.append(parameters[start:place].strip())
            start = place + 1
    return [*parts, parameters[start:].strip()]


def _errors() -> list[str]:
    text = inspect.getdoc(umbel.errors) or ""
    about, _, tree = text.partition("\n\n")
    return ["## errors", "", about, "", "```text", tree.strip(), "```", ""]
