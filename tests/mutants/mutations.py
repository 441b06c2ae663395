"""Mutations: small wrong changes to a source text, each at one place. Pure: text in, mutants out.

A Python file is changed by its syntax tree: the text of one node is replaced, the rest stays as it
is, so a mutant has the lines of the original. A Lua script is changed by its text.

Left alone: docstrings, annotations, imports, decorators, assertions, and what is told to people (log
lines, texts of errors). Nothing is promised of their words, so a test that pins them would be in the way.
The same holds for numbers with a name in capitals: limits and pauses that may be tuned.
"""

import ast
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

Change = tuple[str, str]  # the operator, the new text of the node


@dataclass(frozen=True, slots=True)
class Mutant:
    operator: str
    line: int
    before: str  # the line that was changed, stripped
    after: str
    text: str  # the whole file, changed


_HEADER = re.compile(r"# ---- (.+?) -+")


def within(text: str, sections: Sequence[str], mutants: Sequence[Mutant]) -> list[Mutant]:
    """The mutants of these sections of a text; ValueError for a section that it does not have."""
    section_of: list[str] = []
    for line in text.splitlines():
        header = _HEADER.fullmatch(line)
        section_of.append(header[1] if header else section_of[-1] if section_of else "")
    if missing := set(sections) - set(section_of):
        raise ValueError(f"no section has the header {' or '.join(sorted(missing))}")
    return [one for one in mutants if section_of[one.line - 1] in sections]


def python_mutants(text: str) -> list[Mutant]:
    source = text.encode()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found = []
    for node, (operator, new) in _changes(ast.parse(text)):
        assert node.end_lineno is not None and node.end_col_offset is not None
        begin = starts[node.lineno - 1] + node.col_offset
        end = starts[node.end_lineno - 1] + node.end_col_offset
        found.append(_mutant(source, operator, begin, end, new.encode()))
    return [one for one in found if one.before != one.after and _compiles(one.text)]


def _compiles(text: str) -> bool:
    try:
        compile(text, "mutant", "exec")
    except SyntaxError:  # such as `pass` within a class pattern
        return False
    return True


def _mutant(source: bytes, operator: str, begin: int, end: int, new: bytes) -> Mutant:
    changed = source[:begin] + new + source[end:]
    line = source.count(b"\n", 0, begin) + 1
    before, after = (text.decode().splitlines()[line - 1].strip() for text in (source, changed))
    return Mutant(operator, line, before, after, changed.decode())


# ---- Python ----------------------------------------------------------------------------------------

_COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
}


def _changes(tree: ast.Module) -> Iterator[tuple[ast.expr | ast.stmt, Change]]:
    for node in _mutable(tree):
        for change in _of_node(node):
            yield node, change
        for condition in _conditions(node):
            # A loop that never ends says no more than a time-out.
            for forced in ("False",) if isinstance(node, ast.While) else ("True", "False"):
                yield condition, ("condition", forced)


def _mutable(node: ast.AST) -> Iterator[ast.expr | ast.stmt]:
    """The expressions and statements that may be changed, from the outside in."""
    if isinstance(node, ast.expr | ast.stmt):
        if _is_for_people(node):
            return
        yield node
    if isinstance(node, ast.Raise):  # its text
        return
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "bases", "type"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _mutable(child)


def _is_for_people(node: ast.AST) -> bool:
    match node:
        case ast.Import() | ast.ImportFrom() | ast.Assert() | ast.JoinedStr() | ast.Raise(exc=None):
            return True
        case ast.Expr(value=ast.Constant()):  # a docstring
            return True
        case ast.Assign(targets=[ast.Name(id=name)], value=value):
            return name.isupper() and _is_number(value)
        case ast.Assign(targets=[ast.Tuple(names)], value=ast.Tuple(values)):
            return all(ast.unparse(name).isupper() for name in names) and all(map(_is_number, values))
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id="log")))):
            return True
        case ast.If(
            test=ast.Name(id="TYPE_CHECKING") | ast.Call(func=ast.Attribute(value=ast.Name(id="log")))
        ):
            return True
    return False


def _is_number(node: ast.expr) -> bool:
    """Also as arithmetic with numbers: 8 * 1024."""
    match node:
        case ast.Constant(value=float() | int()):
            return True
        case ast.BinOp(left, _, right):
            return _is_number(left) and _is_number(right)
    return False


def _of_node(node: ast.AST) -> Iterator[Change]:
    match node:
        case ast.Compare(left, [operator], [right]):
            for other in _COMPARISONS[type(operator)]:
                yield "comparison", _text(ast.Compare(left, [other()], [right]))
        case ast.BoolOp(operator, values):
            yield (
                "boolean",
                _text(ast.BoolOp(ast.Or() if isinstance(operator, ast.And) else ast.And(), values)),
            )
        case ast.UnaryOp(ast.Not(), operand):
            yield "boolean", _text(operand)
        case ast.BinOp(left, operator, right) if type(operator) in _ARITHMETIC:
            yield "arithmetic", _text(ast.BinOp(left, _ARITHMETIC[type(operator)](), right))
        case ast.AugAssign(target, operator, value) if type(operator) in _ARITHMETIC:
            yield "arithmetic", ast.unparse(ast.AugAssign(target, _ARITHMETIC[type(operator)](), value))
            yield "deleted", "pass"
        case ast.Constant(value):
            yield from _of_constant(value)
        case ast.Return(value=ast.expr() as value) if ast.unparse(value) != "None":
            yield "return", "return None"
        case ast.Expr(value=ast.Call() | ast.Await()) | ast.Assign() | ast.Delete():
            yield "deleted", "pass"
        case ast.Raise() | ast.Continue() | ast.Break():
            yield "deleted", "pass"


def _of_constant(value: object) -> Iterator[Change]:
    match value:
        case bool():
            yield "constant", repr(not value)
        case int() | float():
            yield "constant", repr(value + 1)
            if value == 1:
                yield "constant", "0"
        case str():
            yield "constant", "''" if value else "'mutant'"
        case bytes():
            yield "constant", "b''" if value else "b'mutant'"


def _conditions(node: ast.AST) -> Iterator[ast.expr]:
    match node:
        case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test):
            yield test
        case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
            for generator in node.generators:
                yield from generator.ifs


def _text(node: ast.expr) -> str:
    return f"({ast.unparse(ast.fix_missing_locations(node))})"


# ---- Lua -------------------------------------------------------------------------------------------

_STRING = r"'[^']*'|\"[^\"]*\""
_REPLACED: tuple[tuple[str, str, str | Callable[[re.Match[str]], str]], ...] = (
    ("comparison", r"==", "~="),
    ("comparison", r"~=", "=="),
    ("comparison", r"<(?!=)", "<="),
    ("comparison", r"<=", "<"),
    ("comparison", r"<=|<(?!=)", ">"),
    ("comparison", r"(?<![<>=~])>(?!=)", ">="),
    ("comparison", r">=", ">"),
    ("comparison", r">=|>(?!=)", "<"),
    ("boolean", r"\band\b", "or"),
    ("boolean", r"\bor\b", "and"),
    ("boolean", r"\bnot\b ", ""),
    ("arithmetic", r" \+ ", " - "),
    ("arithmetic", r" - ", " + "),
    ("arithmetic", r" \* ", " / "),
    ("arithmetic", r" / ", " * "),
    ("constant", r"\btrue\b", "false"),
    ("constant", r"\bfalse\b", "true"),
    ("constant", r"(?<![\w.])\d+(?![\w.])", lambda found: str(int(found[0]) + 1)),
    ("constant", r"(?<![\w.])1(?![\w.])", "0"),
    ("condition", r"(?<=\bif ).*(?= then\b)", "true"),
    ("condition", r"(?<=\bif ).*(?= then\b)", "false"),
    ("return", r"(?<=^return ).+$", "nil"),
    ("return", r"(?<= return ).+(?= end$)|(?<= return ).+$", "nil"),
)
_TUNABLE = re.compile(r"\s*local [A-Z_]+ = [\d* ]+$")
_STATEMENT = re.compile(r"\s*(?:redis\.call\(.*\)|[\w.\[\]#+ ]+ = (?!function\b).*|\w+\(.*\))$")


def lua_mutants(text: str) -> list[Mutant]:
    found: list[Mutant] = []
    lines = text.splitlines()
    for number, line in enumerate(lines):
        code = line.partition("--")[0].rstrip()
        for operator, new in () if _TUNABLE.match(code) else _of_line(code):
            if new != code:
                changed = "\n".join([*lines[:number], new, *lines[number + 1 :], ""])
                found.append(Mutant(operator, number + 1, code.strip(), new.strip(), changed))
    return found


def _of_line(code: str) -> Iterator[Change]:
    for string in re.finditer(_STRING, code):
        other = "''" if len(string[0]) > 2 else "'mutant'"
        yield "constant", code[: string.start()] + other + code[string.end() :]
    bare = re.sub(_STRING, lambda string: "'" + "\0" * (len(string[0]) - 2) + "'", code)
    for operator, pattern, new in _REPLACED:
        for place in re.finditer(pattern, bare):
            put = new if isinstance(new, str) else new(place)
            yield operator, code[: place.start()] + put + code[place.end() :]
    if (
        _STATEMENT.match(bare)
        and not re.match(r"\s*(local|for)\b", bare)
        and bare.count("(") == bare.count(")")
    ):
        yield "deleted", ""
