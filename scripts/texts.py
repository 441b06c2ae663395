"""The texts that people read when something happens: log lines and errors, from the source.

    python -m scripts.texts [--sample 200] [--seed 1]     all of them, or a random sample

For a reader who does not know the code: can they say, for each, what happened and what to do?
"""

import argparse
import ast
import random
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "umbel"
LEVELS = frozenset({"debug", "info", "warning", "error", "critical", "exception", "log"})
WORDS_MIN = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sample", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    found = list(texts())
    if options.sample:
        found = random.Random(options.seed).sample(found, min(options.sample, len(found)))
    for line in found:
        print(line)


def texts() -> Iterator[str]:
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            for line, kind, text in _texts_of(node):
                if len(text.split()) >= WORDS_MIN:
                    yield f"{path.relative_to(SOURCE)}:{line}: {kind}: {' '.join(text.split())}"


def _texts_of(node: ast.AST) -> Iterator[tuple[int, str, str]]:
    if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
        yield node.lineno, "error", _text(node.exc.args[0])
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
        logger = node.func.value
        if node.func.attr in LEVELS and isinstance(logger, ast.Name) and logger.id == "log":
            yield node.lineno, node.func.attr, _text(node.args[-1 if node.func.attr == "log" else 0])


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.JoinedStr):
        return "".join(map(_text, node.values))
    if isinstance(node, ast.FormattedValue):
        return f"{{{ast.unparse(node.value)}}}"
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


if __name__ == "__main__":
    main()
