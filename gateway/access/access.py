"""From an ``authorization`` header to a `Caller`: the one place where credentials are looked at."""

from __future__ import annotations

import hmac
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from diptych.runtime.errors import PermissionDenied, Unauthenticated
from diptych.runtime.file_watch import FileWatch
from gateway.access.caller import Caller, Scope, anonymous
from gateway.access.key_file import BadKeyFile, KeyEntry, NoKeys, digest_of, read_key_file
from gateway.access.quota import QuotaUsage

_SCHEME = "bearer"  # RFC 6750; schemes are written in any case
_INDEX_BYTES = 4
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Known:
    digest: bytes
    caller: Caller


class Access:
    """Knows the callers by their keys, as the file has them now.

    The file is looked at once a second at most, when somebody calls. One that has become bad or is gone may
    be half written: the keys of before stay, also those taken out of it, and the log says so until it is
    read. One that has no key left is meant so: then nobody can call.

    Args:
        path: of the keys; None: no keys are asked for and everybody is one tenant.

    Raises:
        BadKeyFile: at the start only.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._anybody = anonymous()
        self._meters: dict[
            str, QuotaUsage
        ] = {}  # by name: a quota is not used up anew when the file is read again
        self._known: dict[bytes, list[_Known]] = {}
        self._watch: FileWatch | None = None
        if path is not None:
            self._watch = FileWatch(path)
            self._take(read_key_file(path))

    def caller(self, authorization: str, scope: Scope) -> Caller:
        """Raises `Unauthenticated`, `PermissionDenied`."""
        if self._watch is None:
            return self._anybody
        self._refresh(self._watch)
        scheme, _, key = authorization.partition(" ")
        if not key or scheme.lower() != _SCHEME:
            raise Unauthenticated("an API key is required: authorization: Bearer KEY")
        caller = self._find(digest_of(key.strip()))
        if caller is None:
            raise Unauthenticated("this API key is not known here")
        if scope not in caller.scopes:
            raise PermissionDenied(f"this API key lacks the scope {scope.value}")
        return caller

    def _find(self, digest: bytes) -> Caller | None:
        # The index may be timed: who learns the first bytes of a digest knows nothing of a key.
        for known in self._known.get(digest[:_INDEX_BYTES], ()):
            if hmac.compare_digest(known.digest, digest):
                return known.caller
        return None

    def _refresh(self, watch: FileWatch) -> None:
        if self._path is None or not watch.changed():
            return
        try:
            self._take(read_key_file(self._path))
            _log.info("the API keys were read again: %d", len(self._meters))
        except NoKeys:
            self._known = {}  # what was used of the quotas stays known
            _log.warning("%s has no key any more: every call that needs one is refused", self._path)
        except BadKeyFile as error:
            if watch.failed(str(error)):
                _log.error("the API keys stay as they were, also those taken out since: %s", error)

    def _take(self, entries: Sequence[KeyEntry]) -> None:
        known: dict[bytes, list[_Known]] = {}
        meters = {}
        for entry in entries:
            meter = self._meters.get(entry.name)
            if meter is None or meter.quota != entry.quota:
                meter = QuotaUsage(entry.name, entry.quota)
            meters[entry.name] = meter
            digest = bytes.fromhex(entry.sha256)
            caller = Caller(entry.tenant, frozenset(entry.scopes), meter)
            known.setdefault(digest[:_INDEX_BYTES], []).append(_Known(digest, caller))
        self._known, self._meters = known, meters
