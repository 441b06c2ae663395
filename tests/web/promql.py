"""What a PromQL expression names: metrics with their label matchers, labels it groups by, functions.

Enough for what contrib/ has, by regular expressions; it does not judge whether Prometheus would take it.
"""

import re
from dataclasses import dataclass

TEXT = re.compile(r'"(?:[^"\\]|\\.)*"')
RANGE = re.compile(r"\[[^\]]*\]")
GROUPING = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)")
SELECTOR = re.compile(r"([A-Za-z_:][\w:]*)?\s*\{([^{}]*)\}")
MATCHER = re.compile(r'(\w+)\s*(=~|!~|!=|=)\s*"((?:[^"\\]|\\.)*)"')
WORD = re.compile(r"(?<![\w.$:])([A-Za-z_:][\w:]*)(\s*\()?")
OPERATORS = {"and", "or", "unless", "bool", "offset"}


@dataclass(frozen=True)
class Used:
    """`values`: (metric, label, value) for each value that is looked for, those of a variable left out."""

    metrics: frozenset[str]
    matched: frozenset[tuple[str, str]]  # (metric, label)
    values: frozenset[tuple[str, str, str]]
    grouped: frozenset[str]
    functions: frozenset[str]


def used_by(expression: str) -> Used:
    grouped = {one.strip() for found in GROUPING.findall(expression) for one in found.split(",")}
    metrics, matched, values = set[str](), set[tuple[str, str]](), set[tuple[str, str, str]]()
    for name, inside in SELECTOR.findall(expression):
        matchers = MATCHER.findall(inside)
        named = {name} if name else {one for label, _, found in matchers for one in _if_name(label, found)}
        metrics |= named
        for label, _, value in matchers:
            if label != "__name__":
                matched |= {(one, label) for one in named}
                values |= {
                    (one, label, part) for one in named for part in value.split("|") if "$" not in part
                }
    rest = RANGE.sub("", GROUPING.sub("", SELECTOR.sub("", TEXT.sub(_emptied, expression))))
    words = [(word, bool(call)) for word, call in WORD.findall(rest) if word not in OPERATORS]
    return Used(
        metrics=frozenset(metrics | {word for word, is_call in words if not is_call}),
        matched=frozenset(matched),
        values=frozenset(values),
        grouped=frozenset(grouped),
        functions=frozenset(word for word, is_call in words if is_call),
    )


def _if_name(label: str, value: str) -> list[str]:
    return value.split("|") if label == "__name__" else []


def _emptied(_text: re.Match[str]) -> str:
    return '""'
