"""Authentication: the `Caller` behind an ``authorization`` header. No other module reads credentials.

A tenant comes from the credential alone: no field of a request names one.
"""

from __future__ import annotations

import hmac
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from diptych.runtime.errors import PermissionDenied, Unauthenticated
from diptych.runtime.file_watch import FileWatch
from gateway.access.key_file import BadKeyFile, KeyEntry, NoKeys, Scope, digest_of, read_key_file
from gateway.access.quota import Quota, QuotaUsage

if TYPE_CHECKING:  # PyJWT is imported where tokens are taken
    from gateway.access.token_verifier import TokenVerifier

DEFAULT_TENANT: Final = ""  # of all callers of a gateway without API keys
_TOKEN_PREFIX = "jwt:"  # no key of the file has such a name
_MOST_TENANTS = 10_000
_SCHEME = "bearer"  # RFC 6750; schemes are written in any case
_INDEX_BYTES = 4
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Caller:
    """An authenticated caller. A running request keeps its own when the key is removed from the file."""

    tenant: str
    scopes: frozenset[Scope]
    quota_usage: QuotaUsage = field(repr=False)
    adapters: tuple[str, ...] | None = None  # names, or beginnings of names with a * after them; None = all

    def may_use(self, adapter: str) -> bool:
        """Return whether this caller may use the LoRA adapter of this name."""
        return self.adapters is None or any(
            adapter.startswith(one[:-1]) if one.endswith("*") else adapter == one for one in self.adapters
        )


def anonymous() -> Caller:
    """Return the caller of a gateway without API keys: every scope, no quota."""
    return Caller(DEFAULT_TENANT, frozenset(Scope), QuotaUsage("anonymous"))


@dataclass(frozen=True, slots=True)
class _KnownKey:
    digest: bytes
    caller: Caller


class Access:
    """Lookup of callers by API key, after the key file as it is now.

    A call checks the file for a change, once a second at most. A file that became bad or disappeared may be
    half written: the keys read before stay valid, also those removed since, and the log says so until the
    file can be read. A file without any key is meant so: every call is refused.

    Args:
        path: the key file; None: there are no keys.
        tokens: verifier of tokens; None: none is taken. Without either every caller is `anonymous`.
        usage: makes the usage of a key's quota from its name and limits.

    Raises:
        BadKeyFile: from the constructor only.
    """

    def __init__(
        self,
        path: Path | None,
        tokens: TokenVerifier | None = None,
        usage: Callable[[str, Quota], QuotaUsage] = QuotaUsage,
    ) -> None:
        self._path = path
        self._tokens = tokens
        self._new_usage = usage
        self._token_tenants: set[str] = set()
        self._anonymous = anonymous()
        self._usages: dict[str, QuotaUsage] = {}  # by key name: reading the file again resets no quota
        self._known: dict[bytes, list[_KnownKey]] = {}
        self._watch: FileWatch | None = None
        if path is not None:
            self._watch = FileWatch(path)
            self._set_keys(read_key_file(path))

    def caller(self, authorization: str, scope: Scope) -> Caller:
        """Return the caller that ``authorization`` names. Raises `Unauthenticated`, `PermissionDenied`."""
        if self.open:
            return self._anonymous
        if self._watch is not None:
            self._refresh(self._watch)
        scheme, _, key = authorization.partition(" ")
        key = key.strip()
        if not key or scheme.lower() != _SCHEME:
            raise Unauthenticated("an API key is required: authorization: Bearer KEY")
        if self._tokens is not None and key.count(".") == 2:  # keys have none
            caller: Caller | None = self._caller_of_token(self._tokens, key)
        else:
            caller = self._find(digest_of(key))
        if caller is None:
            raise Unauthenticated("this API key is not known here")
        if scope not in caller.scopes:
            raise PermissionDenied(f"this API key lacks the scope {scope.value}")
        return caller

    @property
    def open(self) -> bool:
        """True where no credential is required."""
        return self._watch is None and self._tokens is None

    def caller_of_key(self, tenant: str, name: str) -> Caller | None:
        """Return the caller whose key has a name, for work that it left here; None without such a key.

        It must be of the tenant still, and may ask for inference.
        """
        if self.open:
            return self._anonymous if tenant == DEFAULT_TENANT else None
        if name.startswith(_TOKEN_PREFIX):  # it was valid when the work came; it has expired since
            scopes = frozenset((Scope.INFERENCE,))
            return None if self._tokens is None else Caller(tenant, scopes, QuotaUsage(name))
        if self._watch is not None:
            self._refresh(self._watch)
        for group in self._known.values():
            for known in group:
                caller = known.caller
                if caller.quota_usage.name == name and caller.tenant == tenant:
                    return caller if Scope.INFERENCE in caller.scopes else None
        return None

    def tenants(self) -> int:
        """Return how many tenants there are."""
        callers = [known.caller for group in self._known.values() for known in group]
        return 1 if self.open else len({caller.tenant for caller in callers} | self._token_tenants)

    def _caller_of_token(self, tokens: TokenVerifier, token: str) -> Caller:
        identity = tokens.verify(token)
        name = _TOKEN_PREFIX + identity.subject
        if len(self._token_tenants) < _MOST_TENANTS:
            self._token_tenants.add(identity.tenant)
        return Caller(identity.tenant, identity.scopes, QuotaUsage(name))

    def _find(self, digest: bytes) -> Caller | None:
        # The lookup by prefix may be timed: the first bytes of a digest reveal nothing about a key.
        for known in self._known.get(digest[:_INDEX_BYTES], ()):
            if hmac.compare_digest(known.digest, digest):
                return known.caller
        return None

    def _refresh(self, watch: FileWatch) -> None:
        if self._path is None or not watch.changed():
            return
        try:
            self._set_keys(read_key_file(self._path))
            _log.info("the API keys were read again: %d", len(self._usages))
        except NoKeys:
            self._known = {}  # quota usage is kept
            _log.warning("%s has no key any more: every call that needs one is refused", self._path)
        except BadKeyFile as error:
            if watch.failed(str(error)):
                _log.error("the API keys stay as they were, also those taken out since: %s", error)

    def _set_keys(self, entries: Sequence[KeyEntry]) -> None:
        known: dict[bytes, list[_KnownKey]] = {}
        usages = {}
        for entry in entries:
            usage = self._usages.get(entry.name)
            if usage is None or usage.quota != entry.quota:
                usage = self._new_usage(entry.name, entry.quota)
            usages[entry.name] = usage
            digest = bytes.fromhex(entry.sha256)
            caller = Caller(entry.tenant, frozenset(entry.scopes), usage, entry.adapters)
            known.setdefault(digest[:_INDEX_BYTES], []).append(_KnownKey(digest, caller))
        self._known, self._usages = known, usages
