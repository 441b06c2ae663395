"""Foreign: the one place of the wire that runs code of others.

`repr()` of a user's value and everything pickle does call methods that we did not write and
that may raise anything at all. All such calls go through `attempt`, so that nowhere else in
this package needs to catch everything.
"""

from collections.abc import Callable
from typing import TypeVar

ArgumentT = TypeVar("ArgumentT")
AnswerT = TypeVar("AnswerT")


def attempt(
    call: Callable[[ArgumentT], AnswerT], argument: ArgumentT, otherwise: Callable[[Exception], AnswerT]
) -> AnswerT:
    """Call it; when that raises, the answer is what `otherwise` makes of the error."""
    try:
        return call(argument)
    except Exception as error:
        return otherwise(error)
