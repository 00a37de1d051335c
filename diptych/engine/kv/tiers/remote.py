"""Tier in a server, of Redis's or S3's protocol, shared by the workers that are given it.

    diptych:kv:FINGERPRINT:KEY:PARENT

in hexadecimal; a root's parent is empty. Room is the server's business (Redis: `maxmemory`, `allkeys-lru`).
With a quota it is the workers': blocks leave as use_order.py says, by the uses that a worker knows. Which
blocks a server holds is known by their names, read at the start and again every half minute: what other
workers stored is found after that time, and what the server let go is a miss. A server that fails is left
alone for some seconds, so that requests do not wait for its timeouts one after the other.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from threading import Lock
from typing import Any, Protocol

from diptych.engine.kv.tiers.tier import Entry, Moved
from diptych.engine.kv.tiers.use_order import UseOrder

RESCAN_S = 30.0
"""Age of the list of names after which it is read again."""
AWAY_S = 5.0
"""Time for which a server that failed is not asked."""
_log = logging.getLogger(__name__)
_PAGE = 1000
_FORGOTTEN_AT_ONCE = 1000


class Store(Protocol):
    """The client of the server; `redis.Redis` and `s3.S3Store` are."""

    def get(self, name: bytes) -> Any: ...
    def set(self, name: bytes, value: Entry) -> Any: ...
    def delete(self, *names: bytes) -> Any: ...
    def scan_iter(self, match: bytes, count: int) -> Iterable[bytes]: ...
    def close(self) -> None: ...


class ServerAway(OSError):
    """The server of the tier failed lately, and is not asked."""


class RemoteTier:
    """Entries of one kind of blocks in a server. See `Tier`."""

    def __init__(
        self,
        store: Store,
        failures: tuple[type[Exception], ...],
        fingerprint: bytes,
        entry_bytes: int,
        clock: Callable[[], float] = time.monotonic,
        *,
        name: str = "redis",
        quota: int | None = None,
        at_once: int = 1,
    ) -> None:
        """Take a client, the exceptions that it raises, and what names and sizes the entries.

        `quota` are the most bytes of entries; None leaves that to the server. `at_once` reads are made at a
        time.
        """
        self.name, self.at_once = name, at_once
        self._store = store
        self._failures = failures
        self._prefix = f"diptych:kv:{fingerprint.hex()}:".encode()
        self._entry_bytes = entry_bytes
        self._most = None if quota is None else quota // entry_bytes
        self._clock = clock
        self._lock = Lock()
        self._order = UseOrder(clock)
        self._away_until = self._scanned_at = float("-inf")
        try:
            self.refresh()
        except OSError as error:
            _log.warning("the %s tier does not answer, and is asked again later: %s", name, error)

    @property
    def used(self) -> int:
        return len(self._order) * self._entry_bytes

    def parent_of(self, key: bytes) -> bytes | None:
        return self._order.parent_of(key) if self._clock() >= self._away_until else None

    def items(self) -> list[tuple[bytes, bytes]]:
        with self._lock:
            return self._order.items()

    def rescan(self) -> Moved:
        if self._clock() - self._scanned_at <= RESCAN_S or self._clock() < self._away_until:
            return Moved()
        return self.refresh()

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
        else:
            with self._lock:
                self._order.touch(key)
        return entry

    def put(self, key: bytes, parent: bytes, entry: Entry) -> list[bytes]:
        gone = self._make_room()
        self._call(lambda: self._store.set(self._name_of(key, parent), entry))
        with self._lock:
            self._order.add(key, parent)
        return gone

    def forget(self, keys: Iterable[bytes]) -> None:
        """Remove entries. Raises OSError, also while the server is away: what stayed would be found again."""
        named = [(key, parent) for key in keys if (parent := self._order.parent_of(key)) is not None]
        for start in range(0, len(named), _FORGOTTEN_AT_ONCE):
            batch = named[start : start + _FORGOTTEN_AT_ONCE]
            names = [self._name_of(key, parent) for key, parent in batch]
            self._call(lambda names=names: self._store.delete(*names))  # type: ignore[misc]
            self._note_gone(key for key, _ in batch)

    def refresh(self) -> Moved:
        """Read which blocks the server holds; return those that came and went. Raises OSError."""
        self._scanned_at = self._clock()
        names = self._call(lambda: list(self._store.scan_iter(match=self._prefix + b"*", count=_PAGE)))
        found = dict(filter(None, map(self._key_and_parent, names)))
        with self._lock:
            known = {key for key, _ in self._order.items()}
            moved = Moved(found.keys() - known, known - found.keys())
            for key in moved.went:
                self._order.remove(key)
            for key in _parents_first(found, moved.came):
                self._order.add(key, found[key])
        return moved

    def close(self) -> None:
        self._store.close()

    def _make_room(self) -> list[bytes]:
        """Remove what has to leave for one more entry. Raises OSError."""
        gone: list[bytes] = []
        while self._most is not None and len(self._order) >= self._most:
            with self._lock:
                key = self._order.oldest()
            if key is None:
                break
            self.forget([key])
            gone.append(key)
        return gone

    def _call(self, command: Callable[[], Any]) -> Any:
        if self._clock() < self._away_until:
            raise ServerAway("the server failed a moment ago")
        try:
            return command()
        except self._failures as error:
            self._away_until = self._clock() + AWAY_S
            raise ServerAway(f"{type(error).__name__}: {error}") from None

    def _note_gone(self, keys: Iterable[bytes]) -> None:
        with self._lock:
            for key in keys:
                self._order.remove(key)

    def _name_of(self, key: bytes, parent: bytes) -> bytes:
        return self._prefix + f"{key.hex()}:{parent.hex()}".encode()

    def _key_and_parent(self, name: bytes) -> tuple[bytes, bytes] | None:
        """Return what an entry's name says; None for a name that is none of ours."""
        key, colon, parent = name[len(self._prefix) :].partition(b":")
        try:
            return (bytes.fromhex(key.decode()), bytes.fromhex(parent.decode())) if colon else None
        except ValueError:
            return None


def _parents_first(parents: Mapping[bytes, bytes], keys: Set[bytes]) -> Iterator[bytes]:
    """Yield `keys`, each after its parent if that is among them: a chain's end leaves before its begin."""
    passed: set[bytes] = set()
    for key in sorted(keys):
        chain = []
        while key in keys and key not in passed:
            passed.add(key)
            chain.append(key)
            key = parents[key]
        yield from reversed(chain)
