"""Refusals: what S3 says when it does not do what it is asked, in one line with what to do.

Arrow hands on the answers of S3 as texts of an `OSError`, which is also what it raises for files that are
damaged. So they are told apart by the text.
"""

import re

from umbel.stores.interface import Unavailable

_ANSWER = re.compile(r"AWS Error (\w+)(?: \(HTTP status \d+\))? during (\w+) operation: (.*)", re.DOTALL)
_REFUSED = frozenset(
    ("ACCESS_DENIED", "INVALID_ACCESS_KEY_ID", "SIGNATURE_DOES_NOT_MATCH", "INVALID_CLIENT_TOKEN_ID")
)


def unavailable(error: Exception) -> Unavailable | None:
    """What an error says of the store, if that is what it is about."""
    if isinstance(error, Unavailable):
        return error
    if "AWS Error " not in str(error):  # Arrow says so of whatever S3 answers or does not
        return None
    return refusal("S3", error)


def raise_unavailable(error: Exception) -> None:
    """For who takes errors for damage of a file: not this one, if it is the store's."""
    told = unavailable(error)
    if told is not None:
        raise told from None


def refusal(where: str, error: Exception) -> Unavailable:
    """In one line, with what to do."""
    told = _ANSWER.search(str(error))
    if told is None:
        return Unavailable(where, str(error).partition("\n")[0][:300])
    code, what, message = told[1], told[2], told[3].partition(" (Request ID")[0].partition("\n")[0][:200]
    if code == "NO_SUCH_BUCKET":
        return Unavailable(where, "there is no such bucket; create it, or name another with --lake")
    if code in _REFUSED:
        return Unavailable(
            where,
            f"S3 refused access ({what}: {code}); check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or"
            " AWS_PROFILE, and what they may do with this bucket",
        )
    told_so = ": ".join(filter(None, (what, code, message)))
    return Unavailable(where, f"S3 did not answer ({told_so}); try again")
