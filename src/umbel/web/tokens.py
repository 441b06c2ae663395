"""Tokens: named, hashed, with a role and an end.

A token is random and long, so its SHA-256 is as good as a slow hash: there is nothing to guess. What is
stored tells nobody the token. Comparison takes the same time however much of it is right.
"""

import hashlib
import hmac
from collections.abc import Iterable, Sequence
from secrets import token_urlsafe

import msgspec

from umbel.web.roles import Role

PREFIX = "umbel_"
TOKEN_BYTES = 32
DAY_S = 86_400.0


class Token(msgspec.Struct, frozen=True, kw_only=True):
    """`expires_at`: Unix time; None: it has no end."""

    name: str
    digest: str
    role: Role
    created_at: float
    expires_at: float | None = None

    def is_valid(self, now: float) -> bool:
        return self.expires_at is None or now < self.expires_at


def make_token() -> str:
    return PREFIX + token_urlsafe(TOKEN_BYTES)


def digest_of(token: str) -> str:
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()


def find_token(known: Iterable[Token], given: str, now: float) -> Token | None:
    """The valid token that this is; all are compared, so that time tells nothing."""
    wanted = digest_of(given)
    found: Token | None = None
    for one in known:
        if hmac.compare_digest(one.digest, wanted):
            found = one
    return found if found is not None and found.is_valid(now) else None


def valid(known: Sequence[Token], now: float) -> list[Token]:
    return [one for one in known if one.is_valid(now)]
