"""Index of the blocks that workers hold: the pure state behind a mirror. Snapshots and events in, no I/O.

A block lies in a worker's pool, or only in a tier below it (memory, disk, a store): in its *medium*. What is
in a tier has to be loaded first.

Every worker numbers its updates 1, 2, …. An update that repeats is passed over, so senders may send
again when unsure; a number that is missing means that something was lost, and the worker's whole
snapshot has to be read again. What belongs to another life of the worker than its lease names
(see Identity) counts for nothing.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from diptych.cached_windows import usable_places
from diptych.runtime.discovery.records import Identity


@dataclass(frozen=True)
class PrefixEvent:
    """Update: blocks that entered and left a worker's cache, as 16-byte keys.

    `tiered`: those that are in a tier only now. Those that left the pool for it are in `removed` as well, for
    readers that know no tiers.
    """

    worker_id: str
    identity: Identity
    seq: int
    added: tuple[bytes, ...] = ()
    removed: tuple[bytes, ...] = ()
    tiered: tuple[bytes, ...] = ()


@dataclass(frozen=True)
class PrefixSnapshot:
    """Snapshot of all blocks of a worker, at least up to update `seq`; later updates may be in it already.

    `tiered`: of blocks that are in a tier only; `keys` does not have them.
    """

    worker_id: str
    identity: Identity
    seq: int
    keys: Collection[bytes]
    tiered: Collection[bytes] = ()


@dataclass
class _Holdings:
    identity: Identity
    seq: int
    keys: set[bytes] = field(default_factory=set)
    tiered: set[bytes] = field(default_factory=set)


class PrefixIndex:
    def __init__(self) -> None:
        self._holdings: dict[str, _Holdings] = {}

    def load(self, snapshot: PrefixSnapshot) -> None:
        """Replace all that is known of the snapshot's worker."""
        self._holdings[snapshot.worker_id] = _Holdings(
            snapshot.identity, snapshot.seq, set(snapshot.keys), set(snapshot.tiered)
        )

    def apply(self, event: PrefixEvent) -> bool:
        """Take an update in. False: updates are missing before it, read the worker's snapshot."""
        known = self._holdings.get(event.worker_id)
        if known is None or known.identity.incarnation != event.identity.incarnation:
            return False
        if known.identity.epoch != event.identity.epoch:
            # An older epoch's straggler says nothing; a newer epoch starts from its snapshot.
            return event.identity.epoch < known.identity.epoch
        if event.seq <= known.seq:
            return True
        if event.seq != known.seq + 1:
            return False
        known.seq = event.seq
        for held in (known.keys, known.tiered):
            held.difference_update(event.removed)
        known.keys.update(event.added)
        known.tiered.difference_update(event.added)
        known.tiered.update(event.tiered)
        return True

    def drop(self, worker_id: str) -> None:
        """Forget a worker whose lease ended."""
        self._holdings.pop(worker_id, None)

    def position(self, worker_id: str) -> tuple[Identity, int] | None:
        """(identity, number of the last update) of what is known of a worker; None when nothing is."""
        known = self._holdings.get(worker_id)
        return None if known is None else (known.identity, known.seq)

    def blocks(self, worker_id: str) -> int:
        known = self._holdings.get(worker_id)
        return 0 if known is None else len(known.keys)

    def leading_hits(self, worker_id: str, identity: Identity, keys: Sequence[bytes]) -> int:
        """Count the leading blocks of a prompt that the worker holds, 0 unless its identity is this one.

        Workers evict leaf first, so what they hold of a prompt is always a prefix of it: a binary
        search finds its end in log2(len(keys)) probes.
        """
        known = self._holdings.get(worker_id)
        if known is None or known.identity != identity or not known.keys:
            return 0
        low, high = 0, len(keys)
        while low < high:
            middle = (low + high) // 2
            if keys[middle] in known.keys:
                low = middle + 1
            else:
                high = middle
        return low

    def usable_hits(self, worker_id: str, identity: Identity, keys: Sequence[bytes], reach: int) -> int:
        """Count the leading blocks of a prompt that the worker can use, where its layers with a window have
        blocks of their own; `reach` as in `usable_places`.
        """
        found = self.leading_hits(worker_id, identity, keys)
        return usable_places(keys, found, reach, self._holdings[worker_id].keys.__contains__) if found else 0

    def tier_hits(self, worker_id: str, identity: Identity, keys: Sequence[bytes], first: int) -> int:
        """Count the blocks of a prompt from index `first` on that the worker holds, most of them in tiers.

        0 unless its identity is this one. Each is looked up: tiers evict in an order of their own.
        """
        known = self._holdings.get(worker_id)
        if known is None or known.identity != identity or not known.tiered:
            return 0
        count = 0
        for key in keys[first:]:
            if key not in known.tiered and key not in known.keys:
                break
            count += 1
        return count
