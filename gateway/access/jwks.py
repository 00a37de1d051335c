"""Public keys of the party that signs tokens (JWKS, RFC 7517): from a file, a URL, or OpenID discovery.

A file is looked at once a second at most, as calls come. A URL is read by a thread, at the start and every
`REFRESH_S`. It is read at once, though not more often than every `RETRY_S`, when a token names a key that is
not known. While nothing can be read the keys of before stay valid, and the log says so once for each reason.
A call never waits for it.
"""

from __future__ import annotations

import json
import logging
import threading
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from jwt import PyJWK, PyJWKSet
from jwt.exceptions import PyJWTError

from diptych.runtime.bind_address import is_loopback
from diptych.runtime.file_watch import FileWatch

REFRESH_S: Final = 60.0
RETRY_S: Final = 5.0
TIMEOUT_S: Final = 5.0
MAX_BYTES: Final = 1 << 20
DISCOVERY: Final = "/.well-known/openid-configuration"
_log = logging.getLogger(__name__)


class BadJwks(ValueError):
    """No keys can be read from there; says why."""


def check_url(url: str) -> None:
    """Raise ValueError unless keys may come from there: over HTTPS, or from this machine."""
    parts = urlsplit(url)
    secure = parts.scheme == "https" or (parts.scheme == "http" and is_loopback(parts.hostname or ""))
    if not secure or not parts.hostname:
        raise ValueError(f"{url}: must be an https URL (http only on loopback)")


def parse_keys(text: str | bytes) -> Mapping[str, PyJWK]:
    """Return the signing keys of a JWKS by their ids; the only one may lack an id. Raises BadJwks."""
    try:
        found = PyJWKSet.from_json(text if isinstance(text, str) else text.decode()).keys
    except (PyJWTError, ValueError, TypeError, AttributeError, KeyError) as error:
        raise BadJwks(f"it is no JWKS: {error}") from None
    usable = [key for key in found if key.public_key_use in (None, "sig") and key.key_type != "oct"]
    if not usable:
        raise BadJwks("it has no public key for signatures")
    if len(usable) > 1 and any(not key.key_id for key in usable):
        raise BadJwks("of several keys each needs a kid")
    return {key.key_id or "": key for key in usable}


class FileKeys:
    """Keys of a file."""

    def __init__(self, path: Path) -> None:
        """Read the file. Raises BadJwks."""
        self._path = path
        self._watch = FileWatch(path)
        self._keys = self._read()

    def current(self) -> Mapping[str, PyJWK]:
        """Return the keys by id, of the file as it is now."""
        if self._watch.changed():
            try:
                self._keys = self._read()
                _log.info("the keys of tokens were read again: %d", len(self._keys))
            except BadJwks as error:
                if self._watch.failed(str(error)):
                    _log.error("the keys of tokens stay as they were: %s", error)
        return self._keys

    def want(self) -> None:
        """Do nothing: a file that changed is read anyway."""

    def close(self) -> None:
        """Do nothing."""

    def _read(self) -> Mapping[str, PyJWK]:
        try:
            return parse_keys(self._path.read_bytes())
        except OSError as error:
            raise BadJwks(f"cannot read {self._path}: {error.strerror}") from None
        except BadJwks as error:
            raise BadJwks(f"{self._path}: {error}") from None


class UrlKeys:
    """Keys of a URL; none until they have been read.

    Args:
        url: of a JWKS, or with `discover` of an issuer whose configuration names it.
    """

    def __init__(self, url: str, *, discover: bool = False) -> None:
        self._url, self._discover = url, discover
        self._keys: Mapping[str, PyJWK] = {}
        self._said = ""
        self._wanted, self._closed = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="jwks", daemon=True)
        self._thread.start()

    def current(self) -> Mapping[str, PyJWK]:
        """Return the keys by id."""
        return self._keys

    def want(self) -> None:
        """Read them again soon: a token names another one."""
        self._wanted.set()

    def close(self) -> None:
        """Read no more."""
        self._closed.set()
        self._wanted.set()

    def _run(self) -> None:
        while not self._closed.is_set():
            self._wanted.clear()  # before it reads: a token that comes meanwhile is not forgotten
            try:
                self._keys = self._read()
                self._said = ""
            except (BadJwks, OSError, ValueError) as error:
                if str(error) != self._said:
                    _log.error("the keys of tokens stay as they were: %s: %s", self._url, error)
                self._said = str(error)
            self._closed.wait(RETRY_S)
            if not self._said and not self._closed.is_set():
                self._wanted.wait(REFRESH_S - RETRY_S)

    def _read(self) -> Mapping[str, PyJWK]:
        url = self._url
        if self._discover:
            url = _jwks_uri(fetch(url.rstrip("/") + DISCOVERY), self._url)
        return parse_keys(fetch(url))


def _jwks_uri(configuration: bytes, issuer: str) -> str:
    """Return the address of the keys. Raises ValueError, also where it is another issuer's configuration."""
    try:
        found: Any = json.loads(configuration)
        url, named = found["jwks_uri"], found["issuer"]
    except (KeyError, TypeError) as error:
        raise BadJwks(f"its configuration lacks {error}") from None
    if named != issuer or not isinstance(url, str):
        raise BadJwks(f"its configuration is that of the issuer {named!r}")
    check_url(url)
    return url


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Refuse redirects: they may leave HTTPS."""

    def redirect_request(self, *_: Any) -> None:
        return None


def fetch(url: str) -> bytes:
    """Return the body. Raises OSError and BadJwks."""
    opener = urllib.request.build_opener(_NoRedirect)
    with opener.open(urllib.request.Request(url), timeout=TIMEOUT_S) as answer:
        body: bytes = answer.read(MAX_BYTES + 1)
    if len(body) > MAX_BYTES:
        raise BadJwks(f"more than {MAX_BYTES} bytes")
    return body
