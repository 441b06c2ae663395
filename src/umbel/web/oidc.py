"""OpenID Connect: people log in at their organization's identity provider, which names their groups.

This is the authorization code flow with PKCE. The browser is redirected to the provider and returns with a
code, which only this process can exchange for tokens. Nothing is stored meanwhile: `state`, `nonce` and the
PKCE verifier are derived from a random seed in a signed cookie, which proves that the response belongs to
this browser and this login.

The ID token must be signed by a key of the provider, with an asymmetric algorithm, for this client, and
contain the nonce. If it lacks the claim that names groups, the user info endpoint is asked for it. A role
lasts as long as the session: a person who loses a group at the provider keeps the session until it ends.
"""

import asyncio
import base64
import hashlib
import hmac
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from secrets import token_bytes
from time import time
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote, urlencode

import msgspec

from umbel.web.settings import EVERYONE, Oidc, Role, is_safe_url

BEGIN = "/login/oidc"
CALLBACK = f"{BEGIN}/callback"
LOGIN_MAX_S = 600.0  # how long a person may take at the provider
ANSWER_MAX = 1024 * 1024
TIMEOUT_S = 10.0
REQUESTS_AT_ONCE, WAITING_MAX = 4, 100
DISCOVERED_AGAIN_S = 5.0  # after the provider failed to answer
DISCOVERED_S = 3600.0
KEYS_AGAIN_S = 10.0  # an unknown key may be new, so the keys are fetched again, but not more often
LEEWAY_S = 60.0
SCOPES = ("openid", "profile", "email")
# No symmetric algorithms: anyone who knows the client's secret could sign with it.
ALGORITHMS = frozenset(
    {"RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"}
)
LATE = "late"  # not a login of this browser, so the provider was not asked
NAMES = ("preferred_username", "email", "name", "sub")
AnswerT = TypeVar("AnswerT")


class Person(NamedTuple):
    """A person who logged in at the provider, with the role that the person's groups give."""

    name: str
    subject: str
    role: Role


class LoginFailed(Exception):
    """A failed login. `reason` selects the explanation on the login page; the text is for the audit."""

    def __init__(self, reason: str, detail: str, who: str = "") -> None:
        super().__init__(detail)
        self.reason, self.who = reason, who


class Discovered(msgspec.Struct, frozen=True, kw_only=True):
    """The provider's metadata, as in its discovery document."""

    issuer: str
    authorization_endpoint: str
    token_endpoint: str
    jwks_uri: str
    userinfo_endpoint: str = ""
    id_token_signing_alg_values_supported: tuple[str, ...] = ("RS256",)
    token_endpoint_auth_methods_supported: tuple[str, ...] = ("client_secret_basic",)
    authorization_response_iss_parameter_supported: bool = False


class Keys(msgspec.Struct, frozen=True):
    """The provider's public keys, as JWKs."""

    keys: tuple[dict[str, Any], ...]


class Tokens(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of the token endpoint."""

    id_token: str
    access_token: str = ""


class Provider:
    """The identity provider: starts and finishes logins, and caches its metadata and keys."""

    def __init__(self, settings: Oidc, public_url: str) -> None:
        self._settings = settings
        self._redirect_uri = public_url.rstrip("/") + CALLBACK
        self._secret = token_bytes(32)
        self._threads = ThreadPoolExecutor(REQUESTS_AT_ONCE, "umbel-oidc")
        self._waiting = 0
        self._discovering, self._problem = asyncio.Lock(), (0.0, "")
        self._discovered: tuple[float, Discovered] | None = None
        self._keys: tuple[float, Keys] | None = None

    @property
    def issuer(self) -> str:
        """The issuer as the settings name it."""
        return self._settings.issuer

    def close(self) -> None:
        """Stop the threads that send requests to the provider."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def begin(self) -> tuple[str, str]:
        """Return where to redirect the browser, and the cookie that it must have when it returns."""
        found = await self._discover()
        seed = f"{int(time())}.{_text(token_bytes(32))}"
        parameters = {
            "response_type": "code",
            "client_id": self._settings.client_id,
            "redirect_uri": self._redirect_uri,
            "scope": " ".join(dict.fromkeys((*SCOPES, *self._settings.scopes))),
            "state": self._derived("state", seed),
            "nonce": self._derived("nonce", seed),
            "code_challenge": _text(hashlib.sha256(self._derived("verifier", seed).encode()).digest()),
            "code_challenge_method": "S256",
        }
        joint = "&" if "?" in found.authorization_endpoint else "?"
        return (
            f"{found.authorization_endpoint}{joint}{urlencode(parameters)}",
            f"{seed}.{self._derived('seal', seed)}",
        )

    async def finish(self, answer: Mapping[str, str], cookie: str) -> Person:
        """Return the person who logged in at the provider; raises LoginFailed."""
        seed = self._seed_of(cookie)
        if not _same(answer.get("state", ""), self._derived("state", seed)):
            raise LoginFailed(LATE, "the state is not that of this browser's login")
        found = await self._discover()
        needs_issuer = found.authorization_response_iss_parameter_supported
        issuer = answer.get("iss", "" if needs_issuer else found.issuer)
        if issuer != found.issuer:
            raise LoginFailed("provider", f"the answer comes from another issuer, {issuer[:200]!r}")
        if "code" not in answer:
            why = f"{answer.get('error', 'no code')} {answer.get('error_description', '')}".strip()
            raise LoginFailed("denied", f"the provider refused the login: {why[:200]}")
        tokens = await self._exchange(found, answer["code"], self._derived("verifier", seed))
        claims = await self._verified(found, tokens.id_token, self._derived("nonce", seed))
        name = next(
            (claims[field] for field in NAMES if isinstance(claims.get(field), str) and claims[field]), ""
        )
        subject = str(claims["sub"])
        groups = _values(claims, self._settings.claim)
        if not groups and found.userinfo_endpoint and tokens.access_token:
            info = await self._user_info(found, tokens.access_token, subject)
            groups = _values(info, self._settings.claim)
        role = self._role_of(groups)
        if role is None:
            detail = f"no value of the claim {self._settings.claim!r} is mapped to a role"
            raise LoginFailed("role", detail, name)
        return Person(name, subject, role)

    # -- secrets of a login ----------------------------------------------------------------------

    def _derived(self, purpose: str, seed: str) -> str:
        return _text(hmac.new(self._secret, f"{purpose} {seed}".encode(), hashlib.sha256).digest())

    def _seed_of(self, cookie: str) -> str:
        seed, _, seal = cookie.rpartition(".")
        began = seed.partition(".")[0]
        if not _same(seal, self._derived("seal", seed)) or not 0 <= time() - int(began) <= LOGIN_MAX_S:
            raise LoginFailed(LATE, "no login was started in this browser in the last ten minutes")
        return seed

    # -- requests to the provider ----------------------------------------------------------------

    async def _discover(self) -> Discovered:
        async with self._discovering:
            if self._discovered is not None and time() - self._discovered[0] < DISCOVERED_S:
                return self._discovered[1]
            if time() - self._problem[0] < DISCOVERED_AGAIN_S:
                raise LoginFailed("provider", self._problem[1])
            try:
                found = await self._ask_configuration()
            except LoginFailed as error:
                self._problem = time(), str(error)
                raise
            self._discovered = time(), found
            return found

    async def _ask_configuration(self) -> Discovered:
        url = f"{self._settings.issuer.rstrip('/')}/.well-known/openid-configuration"
        found = await self._ask(Discovered, url)
        if found.issuer != self._settings.issuer:
            detail = f"the provider's issuer is {found.issuer[:200]!r}, not {self._settings.issuer!r}"
            raise LoginFailed("provider", detail)
        return found

    async def _exchange(self, found: Discovered, code: str, verifier: str) -> Tokens:
        form = {
            "grant_type": "authorization_code",
            "code": code,
            "redirect_uri": self._redirect_uri,
            "code_verifier": verifier,
        }
        name, secret = self._settings.client_id, self._settings.client_secret
        headers: dict[str, str] = {}
        if secret and "client_secret_basic" in found.token_endpoint_auth_methods_supported:
            pair = f"{quote(name, safe='')}:{quote(secret, safe='')}"
            headers["Authorization"] = f"Basic {base64.b64encode(pair.encode()).decode()}"
        else:
            form |= {"client_id": name} | ({"client_secret": secret} if secret else {})
        return await self._ask(Tokens, found.token_endpoint, form, headers)

    async def _user_info(self, found: Discovered, access_token: str, subject: str) -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {access_token}"}
        claims = await self._ask(dict[str, Any], found.userinfo_endpoint, None, headers)
        if claims.get("sub") != subject:
            raise LoginFailed("token", "the user info belongs to another subject")
        return claims

    async def _verified(self, found: Discovered, token: str, nonce: str) -> dict[str, Any]:
        """Return the claims of an ID token that is genuine and belongs to this login."""
        import jwt

        allowed = sorted(ALGORITHMS.intersection(found.id_token_signing_alg_values_supported))
        try:
            header = jwt.get_unverified_header(token)
            algorithm = header.get("alg")
            if algorithm not in allowed:
                raise LoginFailed("token", f"the ID token is signed with {algorithm!r}, not with {allowed}")
            key = await self._key(found, header.get("kid"), algorithm)
            claims: dict[str, Any] = jwt.decode(
                token,
                key,
                algorithms=[algorithm],
                audience=self._settings.client_id,
                issuer=self._settings.issuer,
                leeway=LEEWAY_S,
                options={"require": ["iss", "sub", "aud", "exp", "iat"]},
            )
        except (jwt.PyJWTError, ValueError, TypeError) as error:
            raise LoginFailed("token", f"the ID token is not valid: {error}") from None
        audience = claims["aud"]
        if claims.get("azp", self._settings.client_id) != self._settings.client_id or (
            isinstance(audience, list) and len(audience) > 1 and "azp" not in claims
        ):
            raise LoginFailed("token", "the ID token was issued to another client")
        if not _same(str(claims.get("nonce", "")), nonce):
            raise LoginFailed("token", "the ID token belongs to another login")
        return claims

    async def _key(self, found: Discovered, key_id: object, algorithm: str) -> Any:
        import jwt

        for max_age_s in (DISCOVERED_S, KEYS_AGAIN_S):
            if self._keys is None or time() - self._keys[0] >= max_age_s:
                self._keys = time(), await self._ask(Keys, found.jwks_uri)
            if chosen := _chosen(self._keys[1], key_id):
                return jwt.PyJWK(chosen, algorithm)
        raise LoginFailed("token", f"the provider has no key {key_id!r}")

    def _role_of(self, groups: Sequence[str]) -> Role | None:
        """Return the highest role that the person's groups give."""
        roles = [Role(role) for group, role in self._settings.roles.items() if group in {EVERYONE, *groups}]
        return max(roles, key=list(Role).index, default=None)

    async def _ask(
        self,
        kind: type[AnswerT],
        url: str,
        form: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> AnswerT:
        """Return the provider's decoded answer, fetched in a thread; raises LoginFailed."""
        if not is_safe_url(url):
            raise LoginFailed("provider", f"the provider names {url[:200]!r}, which does not use TLS")
        if self._waiting >= WAITING_MAX:
            raise LoginFailed("provider", f"{WAITING_MAX} requests to the provider are waiting already")
        loop = asyncio.get_running_loop()
        self._waiting += 1
        try:
            async with asyncio.timeout(2 * TIMEOUT_S):
                content = await loop.run_in_executor(self._threads, _fetched, url, form, headers or {})
            return msgspec.json.decode(content, type=kind)
        except (OSError, TimeoutError, ValueError, msgspec.MsgspecError, RecursionError) as error:
            detail = (
                f"the provider's answer from {url[:200]} cannot be used: {str(error) or 'it took too long'}"
            )
            raise LoginFailed("provider", detail) from None
        finally:
            self._waiting -= 1


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Follows no redirect: it could lead anywhere, with the client's secret."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


def _fetched(url: str, form: Mapping[str, str] | None, headers: Mapping[str, str]) -> bytes:
    body = None if form is None else urlencode(form).encode()
    request = urllib.request.Request(url, body, {"Accept": "application/json", **headers})  # noqa: S310 (checked)
    try:
        with urllib.request.build_opener(_NoRedirect).open(request, timeout=TIMEOUT_S) as answer:
            content: bytes = answer.read(ANSWER_MAX + 1)
    except urllib.error.HTTPError as error:
        with error:
            problem = error.read(300).decode(errors="replace")
        raise OSError(f"status {error.code}: {problem}") from None
    if len(content) > ANSWER_MAX:
        raise OSError(f"more than {ANSWER_MAX:,} bytes")
    return content


def _chosen(keys: Keys, key_id: object) -> dict[str, Any] | None:
    """Return the key of that id; without an id, the only key."""
    signing = [key for key in keys.keys if key.get("use", "sig") == "sig"]
    found = [key for key in signing if key_id is None or key.get("kid") == key_id]
    return found[0] if len(found) == 1 else None


def _values(claims: Mapping[str, Any], name: str) -> list[str]:
    """Return the texts of a claim, which may be one text or a list of them."""
    found: Any = claims.get(name)
    if found is None:
        found = claims
        for part in name.split("."):
            found = found.get(part) if isinstance(found, Mapping) else None
    if name == "email" and claims.get("email_verified") is not True:
        return []  # without verification a person can enter any address
    many = found if isinstance(found, list) else [found]
    return [value for value in many if isinstance(value, str)]


def _text(value: bytes) -> str:
    return base64.urlsafe_b64encode(value).rstrip(b"=").decode()


def _same(given: str, wanted: str) -> bool:
    return hmac.compare_digest(given.encode("utf-8", "replace"), wanted.encode())
