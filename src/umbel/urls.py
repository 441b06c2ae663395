"""Addresses without their passwords, as shown, logged and put into errors.

A broker's address may hold several, with `;` between them, and a mistyped one need not be an address
at all. So nothing is parsed: whatever stands between the first `:` of the account and the last `@` goes.
"""

import re

_NEXT = re.compile(r";(?=\s*[a-z]+://)")  # a `;` in a password is not followed by a scheme


def each_url(urls: str) -> list[str]:
    return _NEXT.split(urls)


def without_password(urls: str) -> str:
    return ";".join(map(_hidden, each_url(urls)))


def _hidden(url: str) -> str:
    scheme, slashes, rest = url.partition("://") if "://" in url else ("", "", url)
    account, _, place = rest.rpartition("@")
    user, colon, _ = account.partition(":")
    return f"{scheme}{slashes}{user}:***@{place}" if colon else url
