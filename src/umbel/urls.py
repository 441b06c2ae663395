"""Addresses without their passwords, as shown, logged and put into errors.

A broker's address may hold several, with `;` between them, and a mistyped one need not be an address
at all. So nothing is parsed: whatever stands between the first `:` of the account and the last `@` goes, and
so does all from the value of the first parameter whose name says that it is secret (`?password=`).
"""

import re
from urllib.parse import unquote

_NEXT = re.compile(r";(?=\s*[a-z]+://)")  # a `;` in a password is not followed by a scheme
_PARAMETER = re.compile(r"(?:^|[?&\s])([^=?&\s]*)\s*=")
_SECRET = re.compile("passw|secret", re.IGNORECASE)


def each_url(urls: str) -> list[str]:
    return _NEXT.split(urls)


def without_password(urls: str) -> str:
    return ";".join(map(_hidden, each_url(urls)))


def _hidden(url: str) -> str:
    scheme, slashes, rest = url.partition("://") if "://" in url else ("", "", url)
    account, _, place = rest.rpartition("@")
    user, colon, _ = account.partition(":")
    if _cut(account) != account:  # the `@` may be one of that parameter: what is behind it goes too
        rest = f"{user}:***" if colon else account
    elif colon:
        rest = f"{user}:***@{place}"
    return f"{scheme}{slashes}{_cut(rest)}"


def _cut(text: str) -> str:
    """Up to the first parameter that is secret."""
    for parameter in _PARAMETER.finditer(text):
        if _SECRET.search(unquote(parameter[1])):
            return f"{text[: parameter.end()]}***"
    return text
