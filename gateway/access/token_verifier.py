"""JSON Web Tokens (RFC 7519) as credentials beside API keys, as an OpenID provider signs them (RFC 9068).

A token needs `exp`, `iss`, `aud`, `sub` and a tenant's name. Its signature is checked with a public key of
the JWKS, by an algorithm of `ALGORITHMS` and of that key's type: none with a shared secret is taken, and not
`none`. What the claim `scope` (or `scp`) allows here is `diptych:inference` and `diptych:admin`; a token
without the claim may ask for inference.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

import jwt
from jwt import PyJWK
from jwt.exceptions import ExpiredSignatureError, InvalidAudienceError, InvalidIssuerError, PyJWTError

from diptych.runtime.errors import Unauthenticated
from gateway.access.jwt_rules import JwtRules
from gateway.access.key_file import Scope

ALGORITHMS: Final = (
    *("RS256", "RS384", "RS512", "PS256", "PS384", "PS512"),
    *("ES256", "ES384", "ES512", "EdDSA"),
)
LEEWAY_S: Final = 30.0
"""Difference of two clocks that is allowed."""
MAX_TOKEN_CHARS: Final = 8192
SCOPES: Final = {f"diptych:{scope.value}": scope for scope in Scope}
_REQUIRED: Final = ("exp", "iss", "aud", "sub")
_TENANT: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
_SUBJECT_CHARS: Final = 128
_MOST_CACHED: Final = 4096


class Keys(Protocol):
    """Public keys by id."""

    def current(self) -> Mapping[str, PyJWK]: ...
    def want(self) -> None: ...


@dataclass(frozen=True, slots=True)
class TokenIdentity:
    """Claims of a valid token."""

    tenant: str
    subject: str
    scopes: frozenset[Scope]


@dataclass(frozen=True, slots=True)
class _Verified:
    identity: TokenIdentity
    expires_at: float
    key: PyJWK


class TokenVerifier:
    """Verifier of tokens; a token that was verified is known until it expires or its key goes."""

    def __init__(self, keys: Keys, rules: JwtRules) -> None:
        self._keys, self._rules = keys, rules
        self._known: OrderedDict[bytes, _Verified] = OrderedDict()

    def verify(self, token: str) -> TokenIdentity:
        """Return whose token it is. Raises Unauthenticated, which names the fault and never the token."""
        if len(token) > MAX_TOKEN_CHARS:
            raise Unauthenticated("this token is too long")
        digest = hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()
        keys = self._keys.current()
        known = self._known.get(digest)
        if known is not None:
            if time.time() < known.expires_at + LEEWAY_S and known.key in keys.values():
                return known.identity
            del self._known[digest]
        verified = self._verify(token, keys)
        self._known[digest] = verified
        if len(self._known) > _MOST_CACHED:
            self._known.popitem(last=False)
        return verified.identity

    def _verify(self, token: str, keys: Mapping[str, PyJWK]) -> _Verified:
        try:
            header = jwt.get_unverified_header(token)
            key = self._key(header, keys)
            claims = jwt.decode(
                token,
                key,
                algorithms=[key.algorithm_name] if key.algorithm_name in ALGORITHMS else [],
                audience=self._rules.audience,
                issuer=self._rules.issuer,
                leeway=LEEWAY_S,
                options={"require": list(_REQUIRED)},
            )
            expires_at = float(claims["exp"])
        except ExpiredSignatureError:
            raise Unauthenticated("this token has expired") from None
        except InvalidAudienceError:
            raise Unauthenticated("this token is for another audience") from None
        except InvalidIssuerError:
            raise Unauthenticated("this token is of another issuer") from None
        except (PyJWTError, ValueError, TypeError) as error:
            raise Unauthenticated(f"this token is not valid ({type(error).__name__})") from None
        return _Verified(self._identity(claims), expires_at, key)

    def _key(self, header: Mapping[str, Any], keys: Mapping[str, PyJWK]) -> PyJWK:
        name = header.get("kid", "")
        key = keys.get(name) if isinstance(name, str) else None
        if key is None and not name and len(keys) == 1:
            [key] = keys.values()
        if key is None:
            self._keys.want()
            raise Unauthenticated("the key that signed this token is not known here")
        if header.get("alg") != key.algorithm_name:
            raise Unauthenticated("this token is signed by another algorithm than its key is for")
        return key

    def _identity(self, claims: Mapping[str, Any]) -> TokenIdentity:
        tenant, subject = claims.get(self._rules.tenant_claim), claims["sub"]
        if not isinstance(tenant, str) or _TENANT.fullmatch(tenant) is None:
            raise Unauthenticated(f"this token's claim {self._rules.tenant_claim} is no tenant's name")
        if not isinstance(subject, str) or not subject:
            raise Unauthenticated("this token has no subject")
        return TokenIdentity(tenant, subject[:_SUBJECT_CHARS], _scopes(claims))


def _scopes(claims: Mapping[str, Any]) -> frozenset[Scope]:
    said = claims.get("scope", claims.get("scp"))
    if said is None:
        return frozenset((Scope.INFERENCE,))
    words = said.split() if isinstance(said, str) else said if isinstance(said, list) else ()
    return frozenset(SCOPES[word] for word in words if isinstance(word, str) and word in SCOPES)
