"""Verifier of tokens as the gateway's settings describe it."""

from __future__ import annotations

from pathlib import Path

from gateway.access.jwks import FileKeys, UrlKeys
from gateway.access.jwt_rules import JwtRules
from gateway.access.token_verifier import TokenVerifier


def is_url(source: str) -> bool:
    """Return whether keys come from a server, and not from a file."""
    return "://" in source


def open_tokens(rules: JwtRules, source: str | None) -> tuple[TokenVerifier, FileKeys | UrlKeys]:
    """Return the verifier, and its keys, to be closed.

    Keys are those of a file or a URL, without either those that the issuer's configuration names.

    Raises BadJwks for a file that has none.
    """
    keys: FileKeys | UrlKeys
    if source is None:
        keys = UrlKeys(rules.issuer, discover=True)
    elif is_url(source):
        keys = UrlKeys(source)
    else:
        keys = FileKeys(Path(source))
    return TokenVerifier(keys, rules), keys
