"""Topics: whether a routing key fits a pattern, as AMQP's topic exchanges have it."""

from collections.abc import Sequence


def matches(pattern: Sequence[str], words: Sequence[str]) -> bool:
    """Whether a routing key fits a pattern, both split at their dots.

    `*` stands for exactly one word, `#` for any number of words, none included.
    """
    # Row by row over the pattern: fits[n] says whether what was read of it fits words[:n].
    fits = [True] + [False] * len(words)
    for part in pattern:
        if part == "#":
            for place in range(1, len(fits)):
                fits[place] = fits[place] or fits[place - 1]
        else:
            fits = [False] + [fits[place] and part in ("*", word) for place, word in enumerate(words)]
    return fits[-1]
