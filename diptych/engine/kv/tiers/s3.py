"""Client of one bucket of a server of S3's protocol, with the calls that a tier needs (`remote.Store`).

    s3://BUCKET/PREFIX?endpoint=https://HOST:PORT&region=NAME&size=100g

Objects are PREFIX/NAME, where NAME is the tier's. Paths begin with the bucket ("path style"), which all such
servers understand. Requests are signed (sigv4.py), with the credentials that the environment has under AWS'
own names. Connections are kept and used by one thread at a time. One that the server ended while it was idle
is made anew once; whatever else fails is told at once, and the tier leaves the server alone for a while. An
answer has a greatest size and a longest time: a server that sends without end costs neither memory nor a
thread.
"""

from __future__ import annotations

import http.client
import re
import ssl
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from threading import Lock
from urllib.parse import parse_qsl, urlsplit
from xml.etree import ElementTree

from diptych.engine.kv.tiers.sigv4 import Credentials, canonical_path, canonical_query, signed_headers
from diptych.engine.kv.tiers.tier import Entry

TIMEOUT_S = 1.0
"""Longest wait for a connection, and for each part of an answer. A load that takes longer than half a second
is a miss for the request that waits for it.
"""
ANSWER_S = 5.0
"""Longest time of a whole answer, whose parts may each be in time; looked at after each `_PART_BYTES`."""
LIST_BYTES = 4 << 20
"""Most bytes of a list of a thousand names, or of an error."""
_PART_BYTES = 1 << 17
_ENDED = (http.client.RemoteDisconnected, ConnectionError, ssl.SSLEOFError, ssl.SSLZeroReturnError)
"""Errors of a request on a connection that the server ended while it was idle."""
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_PREFIX = re.compile(r"[A-Za-z0-9._/-]*")
_PARAMETERS = frozenset({"endpoint", "region", "size"})
_DEFAULT_REGION = "us-east-1"


class S3Failed(Exception):
    """Request that the server did not carry out. The message has status and code, and no names."""


@dataclass(frozen=True, slots=True)
class S3Place:
    """Place of a tier's objects: endpoint, bucket, prefix."""

    bucket: str
    prefix: str
    secure: bool
    host: str
    """Host, and the port if it is no default one: as the header has it."""
    region: str

    @classmethod
    def parse(cls, url: str, environment: Mapping[str, str]) -> S3Place:
        """Read `s3://…`. Raises ValueError, saying what is wrong."""
        parts = urlsplit(url)
        parameters = dict(parse_qsl(parts.query, keep_blank_values=True))
        if unknown := parameters.keys() - _PARAMETERS:
            raise ValueError(f"s3://… has no {min(unknown)!r}: endpoint, region and size are known")
        if parts.username or parts.password:
            raise ValueError("s3://… takes no credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY")
        if not _BUCKET.fullmatch(parts.netloc):
            raise ValueError("a tier in a bucket is s3://BUCKET/PREFIX?endpoint=https://HOST:PORT")
        prefix = parts.path.strip("/")
        if not _PREFIX.fullmatch(prefix) or {".", ".."} & set(prefix.split("/")):
            raise ValueError(f"{prefix!r} is no prefix of letters, digits and . _ / -")
        region = (
            parameters.get("region")
            or environment.get("AWS_REGION")
            or environment.get("AWS_DEFAULT_REGION")
            or _DEFAULT_REGION
        )
        endpoint = (
            parameters.get("endpoint")
            or environment.get("AWS_ENDPOINT_URL_S3")
            or environment.get("AWS_ENDPOINT_URL")
            or f"https://s3.{region}.amazonaws.com"
        )
        secure, host = _endpoint(endpoint)
        return cls(parts.netloc, f"{prefix}/" if prefix else "", secure, host, region)


def credentials_of(environment: Mapping[str, str]) -> Credentials:
    """Return the credentials of the environment. Raises ValueError where they are missing."""
    access, secret = environment.get("AWS_ACCESS_KEY_ID"), environment.get("AWS_SECRET_ACCESS_KEY")
    if not access or not secret:
        raise ValueError("s3://… needs AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY")
    return Credentials(access, secret, environment.get("AWS_SESSION_TOKEN", ""))


class S3Store:
    """Objects of one place. Used by several threads at once. Raises S3Failed, or OSError."""

    def __init__(
        self,
        place: S3Place,
        credentials: Credentials,
        object_bytes: int,
        *,
        timeout_s: float = TIMEOUT_S,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        """Take where objects lie, and the bytes of one: of a larger one no more is read than shows it."""
        self._place, self._credentials = place, credentials
        self._object_bytes = object_bytes
        self._timeout_s, self._clock = timeout_s, clock
        self._context = ssl.create_default_context() if place.secure else None
        self._idle: list[http.client.HTTPConnection] = []
        self._lock = Lock()
        self._closed = False

    def get(self, name: bytes) -> bytes | None:
        """Return an object; None where there is none. One that is too large is cut after a byte too many."""
        status, body = self._request("GET", self._path(name), most=self._object_bytes + 1)
        if status == http.client.NOT_FOUND and b"NoSuchBucket" not in body:
            return None
        _check(status, body, http.client.OK)
        return body

    def set(self, name: bytes, value: Entry) -> None:
        """Store an object."""
        _check(*self._request("PUT", self._path(name), payload=value), http.client.OK)

    def delete(self, *names: bytes) -> None:
        """Remove objects; those that are not there count as removed."""
        for name in names:
            status, body = self._request("DELETE", self._path(name))
            if status != http.client.NOT_FOUND or b"NoSuchBucket" in body:
                _check(status, body, http.client.NO_CONTENT, http.client.OK)

    def scan_iter(self, match: bytes, count: int) -> Iterable[bytes]:
        """Yield the names that begin as `match` does before its star, `count` a request at most."""
        begin = self._place.prefix + match.decode().removesuffix("*")
        query = {"list-type": "2", "prefix": begin, "max-keys": str(count)}
        while True:
            status, body = self._request("GET", f"/{self._place.bucket}", canonical_query(query.items()))
            _check(status, body, http.client.OK)
            names, following = _names(body)
            yield from (name.removeprefix(self._place.prefix).encode() for name in names)
            if not following:
                return
            query["continuation-token"] = following

    def close(self) -> None:
        """Close the connections that are not in use; the others are closed when they are returned."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def _path(self, name: bytes) -> str:
        return canonical_path(f"/{self._place.bucket}/{self._place.prefix}{name.decode()}")

    def _request(
        self, method: str, path: str, query: str = "", payload: Entry = b"", most: int = LIST_BYTES
    ) -> tuple[int, bytes]:
        """Return status and body of an answer, of the body `most` bytes at most."""
        headers = signed_headers(
            method,
            path,
            query,
            {"host": self._place.host},
            payload,
            credentials=self._credentials,
            region=self._place.region,
            now=self._clock(),
        )
        target = f"{path}?{query}" if query else path
        with self._lock:
            connection = self._idle.pop() if self._idle else None
        if connection is not None:
            try:
                return self._send(connection, method, target, payload, headers, most)
            except _ENDED:
                pass
        return self._send(self._connect(), method, target, payload, headers, most)

    def _send(
        self,
        connection: http.client.HTTPConnection,
        method: str,
        target: str,
        payload: Entry,
        headers: Mapping[str, str],
        most: int,
    ) -> tuple[int, bytes]:
        until = time.monotonic() + ANSWER_S
        try:
            connection.request(method, target, body=payload or None, headers=dict(headers))
            response = connection.getresponse()
            answer = response.status, _body(response, most, until)
        except BaseException:
            connection.close()
            raise
        with self._lock:
            kept = not self._closed and not response.will_close and response.isclosed()
            if kept:
                self._idle.append(connection)
        if not kept:
            connection.close()
        return answer

    def _connect(self) -> http.client.HTTPConnection:
        if self._context is None:
            return http.client.HTTPConnection(self._place.host, timeout=self._timeout_s)
        return http.client.HTTPSConnection(self._place.host, timeout=self._timeout_s, context=self._context)


FAILURES = (S3Failed, OSError, http.client.HTTPException)
"""Exceptions that mean that the server failed."""


def _endpoint(url: str) -> tuple[bool, str]:
    """Return whether an endpoint has TLS, and its host with a port that is no default. Raises ValueError."""
    parts = urlsplit(url)
    secure = parts.scheme == "https"
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/") or parts.query:
        raise ValueError(f"the endpoint {url!r} is not http://HOST:PORT or https://HOST:PORT")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    default = http.client.HTTPS_PORT if secure else http.client.HTTP_PORT
    return secure, host if parts.port in (None, default) else f"{host}:{parts.port}"


def _body(response: http.client.HTTPResponse, most: int, until: float) -> bytes:
    """Return a body, of a longer one its first `most` bytes.

    Raises TimeoutError after `until`, IncompleteRead for a body that ends early.
    """
    parts: list[bytes] = []
    left = most
    while left and (part := response.read(min(left, _PART_BYTES))):
        parts.append(part)
        left -= len(part)
        if time.monotonic() > until:
            raise TimeoutError("the answer takes too long")
    if left and response.length:  # as `read` with a size does not say
        raise http.client.IncompleteRead(b"", response.length)
    return b"".join(parts)


def _check(status: int, body: bytes, *expected: int) -> None:
    if status in expected:
        return
    code = re.search(rb"<Code>([A-Za-z]{1,64})</Code>", body)
    raise S3Failed(f"status {status}{f', {code[1].decode()}' if code else ''}")


def _names(body: bytes) -> tuple[list[str], str]:
    """Return the names of a page, and the token of the next one, empty at the end."""
    try:
        root = ElementTree.fromstring(body)
    except ElementTree.ParseError as error:
        raise S3Failed(f"a list that is no XML: {error}") from None
    space = root.tag[: root.tag.index("}") + 1] if root.tag.startswith("{") else ""
    names = [found.text or "" for found in root.iterfind(f"{space}Contents/{space}Key")]
    more = root.findtext(f"{space}IsTruncated") == "true"
    return names, root.findtext(f"{space}NextContinuationToken") or "" if more else ""
