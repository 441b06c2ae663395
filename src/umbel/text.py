"""Text: what may leave a process, and what may be shown to a person.

A Python text can hold halves of surrogate pairs (`os.fsdecode` makes them of bytes that are no
Unicode), which no encoding carries; and characters that a terminal obeys instead of showing them:
ESC, newlines that forge a line of a log, marks that turn the direction of what follows. Both are
written as Python would write them in a literal, so that nothing is hidden and nothing is lost.
"""


def leaving(text: str) -> str:
    """The text as every encoding can carry it: half a surrogate pair becomes `\\udcff`."""
    if type(text) is str and text.isascii():
        return text
    return str.encode(text, "utf-8", "backslashreplace").decode("utf-8")  # also of a subclass


def one_line(text: str) -> str:
    """The text as a person can be shown it: in one line, with all that is not printed escaped."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode("ascii") for one in text)


def numbered(count: int, noun: str) -> str:
    """`1 task`, `2,000 tasks`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def lines(text: str) -> str:
    """The same for a text whose own newlines are meant: a traceback."""
    return "\n".join(one_line(line.rstrip("\r")) for line in text.split("\n"))
