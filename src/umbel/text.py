"""Text that may leave a process: lines that a terminal can show, and addresses without their passwords.

A Python text may contain halves of surrogate pairs, and text from outside may contain control characters.
Addresses of brokers, backends and lakes are displayed, logged and put into errors without their passwords.
"""

import re
from urllib.parse import unquote

# ---- text ------------------------------------------------------------------------------------------
#
# Halves of surrogate pairs (`os.fsdecode` makes them from bytes that are not Unicode) cannot be encoded.
# Terminals interpret control characters instead of showing them: ESC, newlines that forge a log line, and
# marks that change the text direction. Both are written as escapes, as in a Python literal, so that nothing
# is hidden or lost.


def leaving(text: str) -> str:
    """Return text that every encoding can represent: half a surrogate pair becomes `\\udcff`."""
    if type(text) is str and text.isascii():
        return text
    return str.encode(text, "utf-8", "backslashreplace").decode("utf-8")  # also for a subclass of str


def one_line(text: str) -> str:
    """Return the text in one line, with everything that is not printable escaped."""
    if text.isprintable():
        return text
    return "".join(
        sign if sign.isprintable() else sign.encode("unicode_escape").decode("ascii") for sign in text
    )


def numbered(count: int, noun: str) -> str:
    """Return a number with its noun: `1 task`, `2,000 tasks`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def lines(text: str) -> str:
    """Escape a text like `one_line`, but keep its newlines, as in a traceback."""
    return "\n".join(one_line(line.rstrip("\r")) for line in text.split("\n"))


# ---- urls ------------------------------------------------------------------------------------------
#
# A broker setting may contain several addresses, joined by `;`, and a mistyped one may not be a valid address
# at all. So nothing is parsed: the text between the first `:` of the account and the last `@` is removed, and
# so is everything from the value of the first parameter whose name suggests a secret (`?password=`).

SEVERAL_HOSTS = "it has several hosts joined by ','; write an address for each, joined by ';'"
LAKES = "the path of a folder, such as /srv/umbel-lake, or s3://bucket/prefix"
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)
_NEXT = re.compile(r";(?=\s*[a-z]+://)")  # a `;` in a password is not followed by a scheme
_PARAMETER = re.compile(r"(?:^|[?&\s])([^=?&\s]*)\s*=")
_SECRET = re.compile("passw|secret", re.IGNORECASE)


def each_url(urls: str) -> list[str]:
    """Return the addresses, which are joined by `;`."""
    return _NEXT.split(urls)


def without_password(urls: str) -> str:
    """Return the addresses without passwords and secret parameters."""
    return ";".join(map(_hidden, each_url(urls)))


def several_hosts(url: str) -> bool:
    """Return whether one address names several hosts joined by commas, which other programs allow."""
    place = re.split("[/?]", url.partition("://")[2], maxsplit=1)[0]
    return "," in place.rpartition("@")[2]


def lake_place(named: str) -> str:
    """Return the location of a lake: a path (also given as `file:///…`) or `s3://bucket/prefix`.

    Raises ValueError for any other address, because it could be taken for a relative path: `gs://bucket/x` is
    the folder `gs:` if that exists.
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
    if _cut(account) != account:  # the `@` may belong to that parameter, so the text after it is removed too
        rest = f"{user}:***" if colon else account
    elif colon:
        rest = f"{user}:***@{place}"
    return f"{scheme}{slashes}{_cut(rest)}"


def _cut(text: str) -> str:
    """Return the text up to the value of the first secret parameter."""
    for parameter in _PARAMETER.finditer(text):
        if _SECRET.search(unquote(parameter[1])):
            return f"{text[: parameter.end()]}***"
    return text
