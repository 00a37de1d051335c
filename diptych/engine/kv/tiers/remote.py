"""Tier in a server of Redis's protocol, shared by the workers that are given it.

    diptych:kv:FINGERPRINT:KEY:PARENT

in hexadecimal; a root's parent is empty. Room is the server's business (`maxmemory`, `allkeys-lru`). Which
blocks it holds is known by their names, read at the start and again every half minute: what other workers
stored is found after that time, and what the server let go is a miss. A server that fails is left alone for
some seconds, so that requests do not wait for its timeouts one after the other.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable
from threading import Lock
from typing import Any, Protocol

from diptych.engine.kv.tiers.tier import Moved

RESCAN_S = 30.0
"""Age of the list of names after which it is read again."""
AWAY_S = 5.0
"""Time for which a server that failed is not asked."""
_PAGE = 1000
_FORGOTTEN_AT_ONCE = 1000


class Store(Protocol):
    """The client of the server; `redis.Redis` is one."""

    def get(self, name: bytes) -> Any: ...
    def set(self, name: bytes, value: bytes) -> Any: ...
    def delete(self, *names: bytes) -> Any: ...
    def scan_iter(self, match: bytes, count: int) -> Iterable[bytes]: ...
    def close(self) -> None: ...


class ServerAway(OSError):
    """The server of the tier failed lately, and is not asked."""


class RemoteTier:
    """Entries of one kind of blocks in a server. See `Tier`."""

    name = "redis"

    def __init__(
        self,
        store: Store,
        failures: tuple[type[Exception], ...],
        fingerprint: bytes,
        entry_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take a client, the exceptions that it raises, and what names and sizes the entries."""
        self._store = store
        self._failures = failures
        self._prefix = f"diptych:kv:{fingerprint.hex()}:".encode()
        self._entry_bytes = entry_bytes
        self._clock = clock
        self._lock = Lock()
        self._parents: dict[bytes, bytes] = {}
        self._away_until = self._scanned_at = float("-inf")
        with contextlib.suppress(OSError):  # a server that comes later is found later
            self.refresh()

    @property
    def used(self) -> int:
        return len(self._parents) * self._entry_bytes

    def parent_of(self, key: bytes) -> bytes | None:
        return self._parents.get(key) if self._clock() >= self._away_until else None

    def items(self) -> list[tuple[bytes, bytes]]:
        with self._lock:
            return list(self._parents.items())

    def rescan(self) -> Moved:
        if self._clock() - self._scanned_at <= RESCAN_S or self._clock() < self._away_until:
            return Moved()
        before = set(self._parents)
        self.refresh()
        after = set(self._parents)
        return Moved(after - before, before - after)

    def get(self, key: bytes) -> bytes | None:
        parent = self.parent_of(key)
        if parent is None:
            return None
        try:
            entry: bytes | None = self._call(lambda: self._store.get(self._name_of(key, parent)))
        except OSError:
            return None
        if entry is None:
            self._note_gone([key])
        return entry

    def put(self, key: bytes, parent: bytes, entry: bytes) -> list[bytes]:
        self._call(lambda: self._store.set(self._name_of(key, parent), entry))
        with self._lock:
            self._parents[key] = parent
        return []

    def forget(self, keys: Iterable[bytes]) -> None:
        """Remove entries. Raises OSError, also while the server is away: what stayed would be found again."""
        named = [(key, parent) for key in keys if (parent := self._parents.get(key)) is not None]
        for start in range(0, len(named), _FORGOTTEN_AT_ONCE):
            batch = named[start : start + _FORGOTTEN_AT_ONCE]
            names = [self._name_of(key, parent) for key, parent in batch]
            self._call(lambda names=names: self._store.delete(*names))  # type: ignore[misc]
            self._note_gone(key for key, _ in batch)

    def refresh(self) -> None:
        """Read which blocks the server holds. Raises OSError."""
        self._scanned_at = self._clock()
        names = self._call(lambda: list(self._store.scan_iter(match=self._prefix + b"*", count=_PAGE)))
        found = dict(filter(None, map(self._key_and_parent, names)))
        with self._lock:
            self._parents = found

    def close(self) -> None:
        self._store.close()

    def _call(self, command: Callable[[], Any]) -> Any:
        if self._clock() < self._away_until:
            raise ServerAway("the server failed a moment ago")
        try:
            return command()
        except self._failures as error:
            self._away_until = self._clock() + AWAY_S
            raise ServerAway(type(error).__name__) from None

    def _note_gone(self, keys: Iterable[bytes]) -> None:
        with self._lock:
            for key in keys:
                self._parents.pop(key, None)

    def _name_of(self, key: bytes, parent: bytes) -> bytes:
        return self._prefix + f"{key.hex()}:{parent.hex()}".encode()

    def _key_and_parent(self, name: bytes) -> tuple[bytes, bytes] | None:
        """Return what an entry's name says; None for a name that is none of ours."""
        key, colon, parent = name[len(self._prefix) :].partition(b":")
        try:
            return (bytes.fromhex(key.decode()), bytes.fromhex(parent.decode())) if colon else None
        except ValueError:
            return None
