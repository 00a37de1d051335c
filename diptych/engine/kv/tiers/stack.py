"""Stack of tiers, fastest first: what is stored goes to all of them, what is read is checked and moves up.

To forget something ends an epoch: what was read from a pool, or from a tier, before that moment is not stored
after it, since it may be what had to be forgotten.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from threading import Lock

from diptych.engine.kv.tiers.entry import DamagedEntry, EntryFormat
from diptych.engine.kv.tiers.pinned import PinnedEntry, PinnedSlots
from diptych.engine.kv.tiers.ram import RamTier
from diptych.engine.kv.tiers.tier import Entry, Tier

_log = logging.getLogger(__name__)
_LOG_EVERY_S = 60.0


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """Block that a tier had: its key, the key before it, its bytes, the name of the tier."""

    key: bytes
    parent: bytes
    payload: memoryview
    tier: str
    entry: Entry = field(default=b"", repr=False)
    """The entry that the payload is part of."""
    epoch: int = 0
    """Epoch in which it was read."""


class TierStack:
    """Tiers of one worker. Used by several threads at once."""

    def __init__(
        self, tiers: Sequence[Tier], form: EntryFormat, read_only: Collection[str] = frozenset()
    ) -> None:
        """Take the tiers, fastest first, and the names of those in which other workers store blocks."""
        self.tiers = tuple(tiers)
        self._stored_in = tuple(tier for tier in tiers if tier.name not in read_only)
        self._format = form
        self.slots: PinnedSlots | None = next((one.slots for one in tiers if isinstance(one, RamTier)), None)
        """Page-locked memory of the tier in memory, if it has some."""
        self._lock = Lock()
        self._epoch = 0
        self._complained_at = -_LOG_EVERY_S
        self.damaged = 0
        """Number of entries that were not what they should be."""
        self.stored: Counter[str] = Counter()
        """Number of entries that were put, by tier."""
        self.on_dropped: Callable[[list[bytes]], None] = lambda keys: None
        """Told, by any thread, the keys that lie in no tier any more."""
        self.on_found: Callable[[list[bytes]], None] = lambda keys: None
        """Told, by any thread, the keys that other workers stored."""

    @property
    def epoch(self) -> int:
        """Number of times that something was forgotten."""
        return self._epoch

    @property
    def stores(self) -> bool:
        """True if some tier takes blocks of this worker."""
        return bool(self._stored_in)

    def __contains__(self, key: bytes) -> bool:
        return any(tier.parent_of(key) is not None for tier in self.tiers)

    def keys(self) -> list[bytes]:
        """Return all keys that some tier holds."""
        return list(dict.fromkeys(key for tier in self.tiers for key, _ in tier.items()))

    def leading(self, keys: Iterable[bytes]) -> int:
        """Return how many leading `keys` are held."""
        count = 0
        for key in keys:
            if key not in self:
                break
            count += 1
        return count

    def put(self, key: bytes, parent: bytes, payload: bytes | memoryview | PinnedEntry, epoch: int) -> None:
        """Store a block that was read in `epoch` in every tier that lacks it.

        One that lies in a slot of page-locked memory gets its header there.
        """
        self.rescan()
        lacking = [tier for tier in self._stored_in if tier.parent_of(key) is None]
        if not lacking:
            return
        if isinstance(payload, PinnedEntry):
            self._format.seal(payload.entry, key, parent)
            self._put(lacking, key, parent, payload.entry, epoch)
        else:
            self._put(lacking, key, parent, self._format.pack(key, parent, payload), epoch)

    def at_once(self, key: bytes) -> int:
        """Return how many reads the first tier that holds `key` answers at a time; 1 where none holds it."""
        return next((tier.at_once for tier in self.tiers if tier.parent_of(key) is not None), 1)

    def get(self, key: bytes, parent: bytes) -> StoredBlock | None:
        """Return a block, checked, from the first tier that has it whole; None for a miss. It moves up."""
        one = self.fetch(key, parent)
        if one is not None:
            self.move_up(one)
        return one

    def fetch(self, key: bytes, parent: bytes) -> StoredBlock | None:
        """Return a block as `get` does, and leave it where it lies. Several threads may fetch at once."""
        epoch = self._epoch
        for tier in self.tiers:
            entry = tier.get(key)
            if entry is None:
                continue
            try:
                payload = self._format.payload_of(entry, key, parent)
            except DamagedEntry as error:
                with self._lock:
                    self.damaged += 1
                _log.warning("an entry of the %s tier is damaged, and was removed: %s", tier.name, error)
                tier.forget([key])
                continue
            return StoredBlock(key, parent, payload, tier.name, entry, epoch)
        return None

    def move_up(self, one: StoredBlock) -> None:
        """Store a block that was fetched in the tiers that are faster than its own.

        Of a prefix the blocks before it are stored first: a tier counts how deep each lies.
        """
        place = next(place for place, tier in enumerate(self.tiers) if tier.name == one.tier)
        faster = [tier for tier in self.tiers[:place] if tier in self._stored_in]
        self._put(faster, one.key, one.parent, one.entry, one.epoch)

    def rescan(self) -> None:
        """Take notice of what other workers stored and removed. May block."""
        came: dict[bytes, None] = {}
        went: dict[bytes, None] = {}
        for tier in self.tiers:
            try:
                moved = tier.rescan()
            except OSError as error:
                self._complain(f"what the {tier.name} tier holds cannot be read: {error}")
                continue
            came.update(dict.fromkeys(sorted(moved.came)))
            went.update(dict.fromkeys(sorted(moved.went)))
        if came:
            self.on_found(list(came))
        if dropped := [key for key in went if key not in self]:
            self.on_dropped(dropped)

    def end_epoch(self) -> None:
        """Store nothing any more that was read before now. `forget` or `clear` follows. Never blocks."""
        with self._lock:
            self._epoch += 1

    def forget(self, roots: Iterable[bytes]) -> None:
        """Remove keys and all that continue them. May block."""
        children: dict[bytes, list[bytes]] = {}
        for tier in self.tiers:
            for key, parent in tier.items():
                children.setdefault(parent, []).append(key)
        doomed = dict.fromkeys(roots)
        pending = list(doomed)
        while pending:
            below = [key for key in children.get(pending.pop(), ()) if key not in doomed]
            doomed.update(dict.fromkeys(below))
            pending.extend(below)
        self._remove(list(doomed))

    def clear(self) -> None:
        """Remove everything. May block."""
        self._remove(self.keys())

    def close(self) -> None:
        for tier in self.tiers:
            tier.close()

    def _remove(self, keys: list[bytes]) -> None:
        for tier in self.tiers:
            tier.forget(keys)
        self.on_dropped(keys)

    def _put(self, tiers: Sequence[Tier], key: bytes, parent: bytes, entry: Entry, epoch: int) -> None:
        gone: list[bytes] = []
        for tier in tiers:
            if self._epoch != epoch:
                break
            try:
                gone += tier.put(key, parent, entry)
            except OSError as error:
                self._complain(f"the {tier.name} tier takes no block: {error}")
                continue
            self.stored[tier.name] += 1
            if self._epoch != epoch:  # forgotten meanwhile, perhaps before the entry was there to be found
                tier.forget([key])
        if dropped := [one for one in dict.fromkeys(gone) if one not in self]:
            self.on_dropped(dropped)

    def _complain(self, what: str) -> None:
        now = time.monotonic()
        if now - self._complained_at >= _LOG_EVERY_S:
            self._complained_at = now
            _log.warning(what)
