"""Tier in a folder: one file a block, found again after a restart, shared by the workers that are given it.

    FOLDER/FINGERPRINT/KEY-PARENT.kv

Names are hexadecimal; a root's parent is empty. Files are written under another name and renamed, so that a
name stands for a whole file unless the machine crashed; the digest (entry.py) finds those. Only the owner may
read them: keys and values reveal prompts. Nothing is locked: who reads a file that another worker has removed
finds a miss, and two workers that write one block write the same bytes.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from threading import Lock

from diptych.engine.kv.tiers.tier import Entry, Moved
from diptych.engine.kv.tiers.use_order import UseOrder

SUFFIX = ".kv"
_PART = ".part"
RESCAN_S = 5.0
"""Age of the list of files after which it is read again: other workers write and remove, too."""
_RESCAN_SHARE = 0.05
"""Most of the time that is spent on that."""
_SETTLED_S = 1.0
"""Age of a folder's last change after which its time stands for what is in it."""
ABANDONED_S = 600.0
"""Age of an unfinished file whose writer is gone."""


class DiskTier:
    """Files of one kind of blocks; they leave as use_order.py says."""

    name = "disk"
    at_once = 1

    def __init__(
        self, folder: Path, quota: int, fingerprint: bytes, clock: Callable[[], float] = time.time
    ) -> None:
        """Hold at most `quota` bytes of files in `folder`, which is made if need be. Raises OSError."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder = folder / fingerprint.hex()
        self._folder.mkdir(mode=0o700, exist_ok=True)
        self._quota = quota
        self._clock = clock
        self._sizes: dict[bytes, int] = {}
        self._order = UseOrder(clock)
        self._used = 0
        self._lock = Lock()
        self._number = itertools.count()
        self._rescan_at = 0.0
        self._changed_ns: int | None = None
        self.refresh()

    @property
    def used(self) -> int:
        return self._used

    def parent_of(self, key: bytes) -> bytes | None:
        return self._order.parent_of(key)

    def items(self) -> list[tuple[bytes, bytes]]:
        with self._lock:
            return self._order.items()

    def rescan(self) -> Moved:
        if time.monotonic() < self._rescan_at:
            return Moved()
        if self._folder.stat().st_mtime_ns == self._changed_ns:
            self._rescan_at = time.monotonic() + RESCAN_S
            return Moved()
        before = set(self._sizes)
        self.refresh()
        after = set(self._sizes)
        return Moved(after - before, before - after)

    def get(self, key: bytes) -> bytes | None:
        parent = self.parent_of(key)
        if parent is None:
            return None
        path = self._path(key, parent)
        try:
            entry = path.read_bytes()
            os.utime(path)  # the order of use outlives this process
        except OSError:
            self._note_gone(key)
            return None
        with self._lock:
            self._order.touch(key)
        return entry

    def put(self, key: bytes, parent: bytes, entry: Entry) -> list[bytes]:
        if len(entry) > self._quota:
            return []
        gone = self._make_room(len(entry))
        part = self._folder / f"{os.getpid()}-{id(self)}-{next(self._number)}{_PART}"
        try:
            with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(entry)
            part.replace(self._path(key, parent))
        except OSError:
            part.unlink(missing_ok=True)
            raise
        self._note(key, parent, len(entry))
        return gone

    def forget(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            parent = self.parent_of(key)
            if parent is not None:
                self._path(key, parent).unlink(missing_ok=True)
                self._note_gone(key)

    def close(self) -> None:
        """Leave the files as they are."""

    def refresh(self) -> None:
        """Read which files there are, in the order of their use. Raises OSError."""
        started, changed_ns = time.monotonic(), self._folder.stat().st_mtime_ns
        self._changed_ns = changed_ns if time.time() - changed_ns / 1e9 > _SETTLED_S else None
        found: list[tuple[float, bytes, bytes, int]] = []
        with os.scandir(self._folder) as files:
            for file in files:
                try:
                    status = file.stat()
                except OSError:
                    continue  # removed by another worker
                if file.name.endswith(_PART):
                    if time.time() - status.st_mtime > ABANDONED_S:
                        Path(file.path).unlink(missing_ok=True)
                elif (named := _key_and_parent(file.name)) is not None:
                    found.append((status.st_mtime, *named, status.st_size))
        found.sort()
        with self._lock:
            self._order = UseOrder(self._clock)
            for used_at, key, parent, _ in found:
                self._order.add(key, parent, used_at)
            self._sizes = {key: size for _, key, _, size in found}
            self._used = sum(self._sizes.values())
        now = time.monotonic()
        self._rescan_at = now + max(RESCAN_S, (now - started) / _RESCAN_SHARE)

    def _make_room(self, needed: int) -> list[bytes]:
        gone: list[bytes] = []
        while self._used + needed > self._quota:
            with self._lock:
                key = self._order.oldest()
            if key is None:
                break
            self.forget([key])
            gone.append(key)
        return gone

    def _note(self, key: bytes, parent: bytes, size: int) -> None:
        with self._lock:
            self._used += size - self._sizes.get(key, 0)
            self._sizes[key] = size
            self._order.add(key, parent)

    def _note_gone(self, key: bytes) -> None:
        with self._lock:
            self._order.remove(key)
            self._used -= self._sizes.pop(key, 0)

    def _path(self, key: bytes, parent: bytes) -> Path:
        return self._folder / f"{key.hex()}-{parent.hex()}{SUFFIX}"


def _key_and_parent(name: str) -> tuple[bytes, bytes] | None:
    """Return what a file's name says; None for a file that is none of ours."""
    stem, dot, suffix = name.rpartition(".")
    key, dash, parent = stem.partition("-")
    if dot + suffix != SUFFIX or not dash or not key:
        return None
    try:
        return bytes.fromhex(key), bytes.fromhex(parent)
    except ValueError:
        return None
