"""A provider of OpenID Connect on this machine: Authlib's server, which knows one client and logs in the
person that a test chooses. Tests also have it sign what an attacker, or a broken provider, would."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from html import escape
from time import time
from types import SimpleNamespace
from typing import Any

from authlib.integrations.flask_oauth2 import AuthorizationServer
from authlib.oauth2.rfc6749 import ClientMixin, grants
from authlib.oauth2.rfc7636 import CodeChallenge
from authlib.oidc.core.grants import OpenIDCode
from authlib.oidc.core.models import AuthorizationCodeMixin
from flask import Flask, Response, jsonify, request
from joserfc import jwt
from joserfc.jwk import OctKey, RSAKey
from werkzeug.serving import make_server

CLIENT, SECRET = "umbel web", "a secret: of & the client"
Claims = dict[str, Any]


class Client(ClientMixin):  # type: ignore[misc]
    def __init__(self, provider: "OidcProvider") -> None:
        self._provider = provider

    def get_client_id(self) -> str:
        return CLIENT

    def get_default_redirect_uri(self) -> str:
        return self._provider.redirect_uri

    def get_allowed_scope(self, scope: str) -> str:
        return scope

    def check_redirect_uri(self, uri: str) -> bool:
        return uri == self._provider.redirect_uri

    def check_client_secret(self, secret: str) -> bool:
        return secret == SECRET

    def check_endpoint_auth_method(self, method: str, endpoint: str) -> bool:
        return method == self._provider.auth_method

    def check_response_type(self, kind: str) -> bool:
        return kind == "code"

    def check_grant_type(self, kind: str) -> bool:
        return kind == "authorization_code"


class Code(SimpleNamespace, AuthorizationCodeMixin):  # type: ignore[misc]
    def get_redirect_uri(self) -> str:
        return str(self.redirect_uri)

    def get_scope(self) -> str:
        return str(self.scope)

    def get_nonce(self) -> str | None:
        nonce: str | None = self.nonce
        return nonce

    def get_auth_time(self) -> int:
        return int(time())


@cache
def rsa_key(kid: str, use: str) -> RSAKey:
    """The same for all tests of a process: making it takes longer than a test."""
    return RSAKey.generate_key(2048, {"kid": kid, "use": use})


class OidcProvider:
    """`person`: the claims of whoever logs in; None: nobody may. `broken`: changes the claims of ID tokens.
    `sign`: makes ID tokens instead. `shown`: changes what discovery says. `info`: claims of the user info.
    `asks`: shows a page first."""

    def __init__(self) -> None:
        self.redirect_uri = ""
        self.auth_method = "client_secret_basic"
        self.person: Claims | None = {"sub": "1", "preferred_username": "ann", "groups": ["ops"]}
        self.info: Claims = {}
        self.asks = False
        self.broken: Callable[[Claims], Claims] = lambda claims: claims
        self.shown: Callable[[Claims], Claims] = lambda claims: claims
        self.sign: Callable[[Claims], str] = self.signed
        self.key = rsa_key("first", "sig")
        self.asked: list[str] = []
        self.codes: dict[str, Code] = {}
        self._server = make_server("127.0.0.1", 0, self._app(), threaded=True)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, name="provider", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._server.shutdown()
        self._thread.join(30)
        self._server.server_close()

    def signed(self, claims: Claims) -> str:
        return str(jwt.encode({"alg": "RS256", "kid": self.key.kid}, claims, self.key, ["RS256"]))

    def _app(self) -> Flask:
        app = Flask("provider")
        server = AuthorizationServer(
            app, lambda _id: Client(self) if _id == CLIENT else None, lambda *_: None
        )
        server.register_grant(self._grant(), [self._id_tokens(), CodeChallenge(required=True)])

        @app.before_request
        def note() -> None:
            self.asked.append(request.path)

        @app.get("/.well-known/openid-configuration")
        def discovery() -> Response:
            return jsonify(self.shown(self._configuration()))

        @app.get("/jwks")
        def jwks() -> Response:
            other = rsa_key(str(self.key.kid), "enc")
            return jsonify(keys=[other.as_dict(private=False), self.key.as_dict(private=False)])

        @app.get("/authorize")
        def authorize() -> Any:
            if self.asks and "approved" not in request.args:
                return f"<a href='{escape(request.url)}&amp;approved=yes'>Approve</a>"
            grant = server.get_consent_grant(end_user=self.person)
            return server.create_authorization_response(grant=grant, grant_user=self.person)

        @app.post("/token")
        def token() -> Any:
            return server.create_token_response()

        @app.get("/userinfo")
        def userinfo() -> Response:
            assert request.headers["authorization"].startswith("Bearer ")
            return jsonify(self.info)

        @app.get("/moved")
        def moved() -> Response:
            return Response(status=302, headers={"Location": f"{self.url}/token"})

        return app

    def _configuration(self) -> Claims:
        return {
            "issuer": self.url,
            "authorization_endpoint": f"{self.url}/authorize",
            "token_endpoint": f"{self.url}/token",
            "jwks_uri": f"{self.url}/jwks",
            "userinfo_endpoint": f"{self.url}/userinfo",
            "response_types_supported": ["code"],
            "subject_types_supported": ["public"],
            "id_token_signing_alg_values_supported": ["RS256"],
            "token_endpoint_auth_methods_supported": [self.auth_method],
            "code_challenge_methods_supported": ["S256"],
        }

    def _grant(self) -> type[Any]:
        provider = self

        class Grant(grants.AuthorizationCodeGrant):  # type: ignore[misc]
            TOKEN_ENDPOINT_AUTH_METHODS = ("client_secret_basic", "client_secret_post")

            def save_authorization_code(self, code: str, asked: Any) -> None:
                payload = asked.payload
                provider.codes[code] = Code(
                    redirect_uri=payload.redirect_uri,
                    scope=payload.scope,
                    nonce=payload.data.get("nonce"),
                    code_challenge=payload.data.get("code_challenge"),
                    code_challenge_method=payload.data.get("code_challenge_method"),
                )

            def query_authorization_code(self, code: str, client: Client) -> Code | None:
                return provider.codes.get(code)

            def delete_authorization_code(self, code: Code) -> None:
                provider.codes = {name: one for name, one in provider.codes.items() if one is not code}

            def authenticate_user(self, code: Code) -> Claims | None:
                return provider.person

        return Grant

    def _id_tokens(self) -> Any:
        provider = self

        class IdTokens(OpenIDCode):  # type: ignore[misc]
            def exists_nonce(self, nonce: str, asked: Any) -> bool:
                return any(code.nonce == nonce for code in provider.codes.values())

            def get_client_claims(self, client: Client) -> Claims:
                return {"iss": provider.url, "aud": [CLIENT]}

            def generate_user_info(self, user: Claims, scope: str) -> Claims:
                return user

            def encode_id_token(self, token: Claims, asked: Any) -> str:
                claims = self.get_compatible_claims(asked)
                claims |= self.get_authorization_code_claims(asked.authorization_code) | asked.user
                return provider.sign(provider.broken(claims))

        return IdTokens()


def with_shared_secret(provider: OidcProvider) -> Callable[[Claims], str]:
    """Signed with the client's secret, which is no key of the provider."""
    key = OctKey.import_key(SECRET.encode().ljust(32, b"x"))
    return lambda claims: str(jwt.encode({"alg": "HS256", "kid": provider.key.kid}, claims, key, ["HS256"]))


@contextmanager
def providing() -> Iterator[OidcProvider]:
    provider = OidcProvider()
    try:
        yield provider
    finally:
        provider.stop()
