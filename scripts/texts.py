"""The texts that people read when something happens: log lines and errors, from the source.

    python -m scripts.texts [--sample 200] [--seed 1] [--bare]     all of them, or a random sample

For a reader who does not know the code: can they say, for each, what happened and what to do? So each is
printed as people see it: an inserted value as {name}, a log line with its fields (` why=…`), an error whose
text is put together in a function or a class with all of its parts. What is known only when it happens
(the text of another error, say) stays a name in braces. `--bare` leaves out the places, for such a reader.
"""

import argparse
import ast
import random
from collections.abc import Iterator
from pathlib import Path

from scripts.text_parts import Parts, fields_of, text_of

SOURCE = Path(__file__).parents[1] / "src" / "umbel"
LEVELS = frozenset({"debug", "info", "warning", "error", "critical", "exception", "log"})
WORDS_MIN = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sample", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--bare", action="store_true")
    options = parser.parse_args()
    found = list(texts())
    if options.sample:
        found = random.Random(options.seed).sample(found, min(options.sample, len(found)))
    for place, line in found:
        print(line if options.bare else f"{place}: {line}")


def texts() -> Iterator[tuple[str, str]]:
    """The place and the text of each; a text that is in several places counts once."""
    files = {path: ast.parse(path.read_text()) for path in sorted(SOURCE.rglob("*.py"))}
    parts, seen = Parts(files), set[str]()
    for path in files:
        for node, known in parts.calls(path):
            for kind, text in _texts_of(node, parts, path, known):
                line = f"{kind}: {' '.join(text.split())}"
                if line not in seen:
                    seen.add(line)
                    yield f"{path.relative_to(SOURCE)}:{node.lineno}", line


def _texts_of(
    call: ast.Call, parts: Parts, path: Path, known: dict[str, ast.expr]
) -> Iterator[tuple[str, str]]:
    match call.func:
        case ast.Attribute(value=ast.Name(id="log"), attr=level) if level in LEVELS and call.args:
            text = text_of(call.args[1 if level == "log" else 0], parts, path, known)
            if _says_something(text):
                after = call.args[2 if level == "log" else 1 :]
                inserted = [text_of(one, parts, path, known, braces=True) for one in after]
                yield level, _inserted(text, inserted) + fields_of(call, parts, path, known)
        case _:
            text = parts.error_text(call, path, known)
            if _says_something(text):
                yield "error", text


def _says_something(text: str) -> bool:
    words = text
    while "{" in words and "}" in words.partition("{")[2]:
        before, _, rest = words.partition("{")
        words = before + rest.partition("}")[2]
    return sum(word.strip(":;,.()")[:1].isalpha() for word in words.split()) >= WORDS_MIN


def _inserted(text: str, values: list[str]) -> str:
    for value in values:
        begin = text.find("%")
        end = begin + 1
        while begin >= 0 and not text[end].isalpha():
            end += 1
        text = text if begin < 0 else f"{text[:begin]}{value}{text[end + 1 :]}"
    return text


if __name__ == "__main__":
    main()
