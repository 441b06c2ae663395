"""Addresses without their passwords, as shown, logged and put into errors; and where lakes are.

A broker's address may hold several, with `;` between them, and a mistyped one need not be an address
at all. So nothing is parsed: whatever stands between the first `:` of the account and the last `@` goes, and
so does all from the value of the first parameter whose name says that it is secret (`?password=`).
"""

import re
from urllib.parse import unquote

SEVERAL_HOSTS = "it has several hosts joined by ','; write an address for each, joined by ';'"
LAKES = "the path of a folder, such as /srv/umbel-lake, or s3://bucket/prefix"
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)
_NEXT = re.compile(r";(?=\s*[a-z]+://)")  # a `;` in a password is not followed by a scheme
_PARAMETER = re.compile(r"(?:^|[?&\s])([^=?&\s]*)\s*=")
_SECRET = re.compile("passw|secret", re.IGNORECASE)


def each_url(urls: str) -> list[str]:
    return _NEXT.split(urls)


def without_password(urls: str) -> str:
    return ";".join(map(_hidden, each_url(urls)))


def several_hosts(url: str) -> bool:
    """Whether one address names several hosts, as other programs have it."""
    place = re.split("[/?]", url.partition("://")[2], maxsplit=1)[0]
    return "," in place.rpartition("@")[2]


def lake_place(named: str) -> str:
    """The path of a folder that is named by it, or as `file:///…`; or `s3://bucket/prefix`. ValueError for
    any other address.

    An address would pass for a relative path: `gs://bucket/x` is a folder `gs:` where one is.
    """
    scheme = _SCHEME.match(named)
    if scheme is None:
        return named
    host, _, path = named[scheme.end() :].partition("/")
    if scheme[0].lower() == "file://" and host.lower() in ("", "localhost") and path:
        return unquote(f"/{path}")
    if scheme[0].lower() == "s3://":
        return _bucket_place(host, path)
    which = "needs an absolute path on this machine" if scheme[0].lower() == "file://" else "is not supported"
    raise ValueError(f"{scheme[0]} {which}; give {LAKES}")


def _bucket_place(bucket: str, prefix: str) -> str:
    if "@" in bucket:
        raise ValueError(
            "s3:// takes no credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
        )
    if not _BUCKET.fullmatch(bucket):
        raise ValueError(f"{bucket!r} is not the name of a bucket; give {LAKES}")
    parts = prefix.strip("/").split("/")
    if any(part in ("", ".", "..") for part in parts) or re.search(r"[?#\x00-\x1f]", prefix):
        raise ValueError(f"{prefix!r} is not a prefix in a bucket; give {LAKES}")
    return f"s3://{bucket}/{'/'.join(parts)}"


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
