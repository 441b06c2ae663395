"""What the texts of log lines and errors are made of: constants, functions and classes of the source.

Names are looked up in their file first, then in all files if only one has them. That is enough for texts:
where it is not, the name stays in braces, and a reader sees that something is inserted there.
"""

import ast
import builtins
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
Known = dict[str, ast.expr]
Assignments = list[tuple[int, str, ast.expr]]
Function = ast.FunctionDef | ast.AsyncFunctionDef

DEPTH_MAX = 6
UNSAID = frozenset(
    {"brief", "one_line", "str", "repr", "shown", "in_one_line"}
)  # they show what they are given
RAISED_BY_CLICK = frozenset(
    {"ClickException", "UsageError", "BadParameter", "BadOptionUsage", "BadArgumentUsage"}
)


class Parts:
    def __init__(self, files: Mapping[Path, ast.Module]) -> None:
        self._files = files
        self._constants: dict[str, list[tuple[Path, ast.expr]]] = defaultdict(list)
        self._functions: dict[str, list[tuple[Path, Function]]] = defaultdict(list)
        self._classes: dict[str, ast.ClassDef] = {}
        for path, tree in files.items():
            self._index(path, tree)
        self._errors = _error_classes(self._classes)
        self._makers_used = {id(maker) for path in files for maker in self._makers_with_texts(path)}
        raised = (
            node.exc for tree in files.values() for node in ast.walk(tree) if isinstance(node, ast.Raise)
        )
        self._raised = {id(one) for one in raised}

    def constant(self, name: str, path: Path) -> ast.expr | None:
        return _nearest(self._constants.get(name, ()), path)

    def function(self, name: str, path: Path) -> Function | None:
        return _nearest(self._functions.get(name, ()), path)

    def calls(self, path: Path) -> Iterator[tuple[ast.Call, Known]]:
        """Every call, with what the names around it were set to last."""
        yield from self._calls_in(self._files[path], [], skips=False)

    def error_text(self, call: ast.Call, path: Path, known: Known) -> str:
        """What the error says that this call makes; nothing if it makes none, or its caller says more."""
        name = _called(call)
        maker = self.function(name, path)
        if name in self._errors or (maker is None and id(call) in self._raised):
            return self._of_class(call, name, path, known)
        if maker is None or id(maker) not in self._makers_used or not _texts_given(call):
            return ""
        inside = {**_last(_assignments(maker)), **self._bound(call, maker, path, known)}
        said = (self.error_text(made, path, inside) for made in _made_errors(maker, self._errors))
        return next(filter(None, said), "")

    def _of_class(self, call: ast.Call, name: str, path: Path, known: Known) -> str:
        node = self._classes.get(name)
        init = _method(node, "__init__")
        told = init and _told_to_super(init)
        if node and init and told:
            inside = {**_last(_assignments(init)), **self._bound(call, init, path, known)}
            return self._of_class(told, _bases(node)[0], path, inside)
        if node and not init:
            return self._of_class(call, next(iter(_bases(node)), ""), path, known)
        said = text_of(call.args[0], self, path, known) if call.args else ""
        return f"Invalid value for {_option(call)}: {said}" if said and name == "BadParameter" else said

    def _bound(self, call: ast.Call, function: Function, path: Path, known: Known) -> Known:
        """What the parameters of the function are in this call, as texts."""
        names = [one.arg for one in function.args.args if one.arg not in ("self", "cls")]
        given = dict(zip(names, call.args, strict=False))
        given |= {one.arg: one.value for one in call.keywords if one.arg}
        return {
            name: ast.Constant(text_of(one, self, path, known, braces=True)) for name, one in given.items()
        }

    def _index(self, path: Path, tree: ast.Module) -> None:
        for node in ast.walk(tree):
            if isinstance(node, Function):
                self._functions[node.name].append((path, node))
            elif isinstance(node, ast.ClassDef):
                self._classes[node.name] = node
        for node in tree.body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                self._constants[node.targets[0].id].append((path, node.value))

    def _makers_with_texts(self, path: Path) -> Iterator[Function]:
        for node in ast.walk(self._files[path]):
            if isinstance(node, ast.Call) and _called(node) not in self._errors and _texts_given(node):
                maker = self.function(_called(node), path)
                if maker and any(True for _ in _made_errors(maker, self._errors)):
                    yield maker

    def _calls_in(
        self, node: ast.AST, above: Assignments, *, skips: bool
    ) -> Iterator[tuple[ast.Call, Known]]:
        if isinstance(node, Function):
            above = [*above, *_assignments(node)]
            skips = id(node) in self._makers_used
        if isinstance(node, ast.Call) and not (skips and _called(node) in self._errors):
            yield node, _last(above, before=node.lineno)
        for child in ast.iter_child_nodes(node):
            yield from self._calls_in(child, above, skips=skips)


def text_of(
    node: ast.expr, parts: Parts, path: Path, known: Known, *, braces: bool = False, depth: int = 0
) -> str:
    """`braces`: what is no text is shown as {expression} rather than as nothing."""

    def inner(one: ast.expr, *, braces: bool = braces, known: Known = known) -> str:
        return text_of(one, parts, path, known, braces=braces, depth=depth + 1)

    shown = f"{{{ast.unparse(node)}}}" if braces else ""
    if depth > DEPTH_MAX:
        return shown
    match node:
        case ast.Constant(value=str() | int() | float() as value):
            return str(value) if isinstance(value, str) or braces else ""
        case ast.JoinedStr():
            return "".join(inner(one, braces=True) for one in node.values)
        case ast.FormattedValue():
            return inner(node.value, braces=True)
        case ast.BinOp(op=ast.Add()):
            return inner(node.left) + inner(node.right)
        case ast.BoolOp(op=ast.Or()):
            is_given = isinstance(node.values[0], ast.Name) and node.values[0].id in known
            return next(filter(None, map(inner, node.values)), "") if is_given else shown
        case ast.IfExp() if not braces:
            return inner(node.body) or inner(node.orelse)
        case ast.Name(id=name):
            given = known.get(name) or (parts.constant(name, path) if name.isupper() else None)
            if isinstance(given, ast.Constant) and isinstance(given.value, int | float) and braces:
                return str(given.value) if name.isupper() else shown
            others = {key: value for key, value in known.items() if key != name}
            return (given is not None and inner(given, braces=False, known=others)) or shown
        case ast.Call(args=[only]) if _called(node) in UNSAID:
            return inner(only)
        case _:
            return shown


def fields_of(call: ast.Call, parts: Parts, path: Path, known: Known) -> str:
    """The fields of a log line, as they stand after its text, and whether a traceback follows."""
    given = {one.arg: one.value for one in call.keywords}
    fields = "".join(f" {name}=…" for name in _keys(given.get("extra"), parts, path, known))
    level = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    return fields + (" (and a traceback)" if level == "exception" or given.get("exc_info") else "")


def _keys(node: ast.expr | None, parts: Parts, path: Path, known: Known) -> Iterator[str]:
    match node:
        case ast.Dict():
            for key, value in zip(node.keys, node.values, strict=True):
                if key is None:
                    yield from _keys(value, parts, path, known)
                else:
                    yield str(key.value) if isinstance(key, ast.Constant) else "…"
        case ast.BinOp(op=ast.BitOr()):
            yield from _keys(node.left, parts, path, known)
            yield from _keys(node.right, parts, path, known)
        case ast.IfExp():
            yield from _keys(node.body, parts, path, known)
        case ast.Name(id=name) if name in known:
            yield from _keys(
                known[name], parts, path, {key: one for key, one in known.items() if key != name}
            )
        case ast.Call():
            function = parts.function(_called(node), path)
            for one in ast.walk(function) if function else ():
                if isinstance(one, ast.Return) and function:
                    yield from _keys(one.value, parts, path, _last(_assignments(function)))
            yield from (one.arg for one in node.keywords if one.arg)


def _nearest(found: Sequence[tuple[Path, T]], path: Path) -> T | None:
    here = [value for place, value in found if place == path]
    among = here or [value for _, value in found]
    return among[0] if len(among) == 1 else None


def _called(call: ast.Call) -> str:
    match call.func:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""


def _option(call: ast.Call) -> str:
    hints = (one.value for one in call.keywords if one.arg == "param_hint")
    return next((str(one.value) for one in hints if isinstance(one, ast.Constant)), "{option}")


def _texts_given(call: ast.Call) -> bool:
    given = [*call.args, *(one.value for one in call.keywords)]
    return any(isinstance(one, ast.JoinedStr) or _is_sentence(one) for one in given)


def _is_sentence(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value


def _error_classes(classes: Mapping[str, ast.ClassDef]) -> frozenset[str]:
    found = {
        name
        for name, one in vars(builtins).items()
        if isinstance(one, type) and issubclass(one, BaseException)
    }
    found |= RAISED_BY_CLICK
    while True:
        more = {
            name for name, one in classes.items() if name not in found and not found.isdisjoint(_bases(one))
        }
        if not more:
            return frozenset(found)
        found |= more


def _bases(node: ast.ClassDef) -> list[str]:
    return [one.id if isinstance(one, ast.Name) else getattr(one, "attr", "") for one in node.bases]


def _method(node: ast.ClassDef | None, name: str) -> Function | None:
    body = node.body if node else []
    return next((one for one in body if isinstance(one, Function) and one.name == name), None)


def _told_to_super(init: Function) -> ast.Call | None:
    calls = (one for one in ast.walk(init) if isinstance(one, ast.Call) and _called(one) == "__init__")
    return next((one for one in calls if not any(isinstance(given, ast.Starred) for given in one.args)), None)


def _made_errors(maker: Function, errors: frozenset[str]) -> Iterator[ast.Call]:
    for one in ast.walk(maker):
        match one:
            case ast.Return(value=ast.Call() as call) if _called(call) in errors:
                yield call


def _assignments(function: Function) -> Assignments:
    found: Assignments = []
    for node in ast.walk(function):
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                found.append((node.lineno, name, value))
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                found.append((node.lineno, name, value))
    return sorted(found, key=lambda one: one[0])


def _last(assignments: Assignments, *, before: float = float("inf")) -> Known:
    return {name: value for line, name, value in assignments if line < before}
