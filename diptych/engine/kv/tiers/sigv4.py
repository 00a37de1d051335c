"""Signatures of requests to servers of S3's protocol: AWS Signature Version 4, in headers. Pure.

    string to sign = "AWS4-HMAC-SHA256", time, scope, SHA-256 of the canonical request, a line each
    signature      = HMAC(HMAC(HMAC(HMAC(HMAC("AWS4" + secret, day), region), "s3"), "aws4_request"), string)

Source: Amazon S3 API reference, "Authenticating requests: using the Authorization header". Its examples are
the tests'.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from urllib.parse import quote

_ALGORITHM = "AWS4-HMAC-SHA256"
_UNRESERVED = "-_.~"


@dataclass(frozen=True, slots=True)
class Credentials:
    """Access key, its secret, and the token of a temporary one."""

    access_key: str
    secret_key: str = field(repr=False)
    session_token: str = field(default="", repr=False)


def canonical_path(path: str) -> str:
    """Return a path as it is signed and sent: all but unreserved characters and slashes are escaped."""
    return quote(path, safe=f"/{_UNRESERVED}")


def canonical_query(parameters: Iterable[tuple[str, str]]) -> str:
    """Return a query as it is signed and sent: escaped, in order of the names."""
    escaped = ((quote(name, safe=_UNRESERVED), quote(value, safe=_UNRESERVED)) for name, value in parameters)
    return "&".join(f"{name}={value}" for name, value in sorted(escaped))


def signed_headers(
    method: str,
    path: str,
    query: str,
    headers: Mapping[str, str],
    payload: bytes | memoryview,
    *,
    credentials: Credentials,
    region: str,
    now: datetime,
) -> dict[str, str]:
    """Return `headers` with those that sign the request.

    `path` and `query` are canonical, `headers` have `host` and whatever else is signed, `now` is in UTC.
    """
    stamp = now.strftime("%Y%m%dT%H%M%SZ")
    digest = hashlib.sha256(payload).hexdigest()
    found = {name.lower(): value.strip() for name, value in headers.items()}
    found |= {"x-amz-content-sha256": digest, "x-amz-date": stamp}
    if credentials.session_token:
        found["x-amz-security-token"] = credentials.session_token
    names = ";".join(sorted(found))
    lines = "".join(f"{name}:{found[name]}\n" for name in sorted(found))
    request = "\n".join((method, path, query, lines, names, digest))
    scope = f"{stamp[:8]}/{region}/s3/aws4_request"
    text = "\n".join((_ALGORITHM, stamp, scope, hashlib.sha256(request.encode()).hexdigest()))
    key = f"AWS4{credentials.secret_key}".encode()
    for part in scope.split("/"):
        key = _hmac(key, part)
    authorization = (
        f"{_ALGORITHM} Credential={credentials.access_key}/{scope},SignedHeaders={names},"
        f"Signature={_hmac(key, text).hex()}"
    )
    return {**found, "authorization": authorization}


def _hmac(key: bytes, text: str) -> bytes:
    return hmac.new(key, text.encode(), hashlib.sha256).digest()
