"""A block pool whose invariants are checked at every change, and checks of the writes to it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from diptych.engine.batch import SequenceStep
from diptych.engine.kv.block_pool import BlockPool
from kvtransfer.protocol.receiver import Receiver
from tests.simulation.model import BLOCK_SIZE
from tests.simulation.virtual_loop import Host


class Violation(Exception):
    """A violated invariant."""


class WatchedPool(BlockPool):
    """A block pool that counts its changes in `version`."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.version = 0
        self.checked = 0

    @property
    def changed(self) -> bool:
        """True when it changed since the last check."""
        return self.version != self.checked


def _counted(name: str) -> Callable[..., Any]:
    method = getattr(BlockPool, name)

    def change(self: WatchedPool, *args: Any, **options: Any) -> Any:
        self.version += 1
        return getattr(BlockPool, name)(self, *args, **options)

    change.__doc__ = method.__doc__
    return change


for _name in (
    "allocate",
    "retain",
    "release",
    "writable",
    "insert",
    "forget",
    "clear_cache",
    "quarantine",
    "release_quarantined",
):
    setattr(WatchedPool, _name, _counted(_name))


def check_pool(pool: WatchedPool, receiver: Receiver | None) -> None:
    """Check that all blocks are accounted for, and that no other request has a writer's blocks."""
    pool.checked = pool.version
    pool.invariants()
    if receiver is None:
        return
    quarantined = 0
    for attempt in receiver._transfers.grants:
        grant = attempt.open_grant
        for block in grant.allocated:
            if attempt.phase.value == "quarantined":
                quarantined += 1
                _require(block in pool._quarantine, f"block {block} left quarantine without proof")
            else:
                _require(pool.references(block) == 1, f"a writer's block {block} is held by others too")
                _require(pool._cache.key_of(block) is None, f"a writer's block {block} is in the cache")
    _require(quarantined == pool.quarantined(), "blocks are in quarantine for no grant")


def check_own_write(pool: WatchedPool, sequence: SequenceStep) -> None:
    """Check that a decode step reads blocks that are held and writes blocks that only it holds."""
    blocks = [block for table in (sequence.block_table, *sequence.window_tables) for block in table]
    written = _written(sequence)
    for block in blocks:
        _require(pool.references(block) > 0, f"a step reads block {block}, which no request holds")
    for block in written:
        _require(pool.references(block) == 1, f"a step writes block {block}, which others hold too")
        _require(pool._cache.key_of(block) is None, f"a step writes block {block}, which is in the cache")


def check_granted_write(receiver: Receiver, writer: Host, sequence: SequenceStep) -> None:
    """Check that a prefill step in place writes only blocks that were granted to this process."""
    mine = _granted_to(receiver, writer)
    for block in _written(sequence):
        _require(block in mine, f"{writer} writes block {block}, which is not granted to it")


def is_granted(receiver: Receiver, writer: Host, sequence: SequenceStep) -> bool:
    """Return whether a step writes only blocks that were granted to this process."""
    return set(_written(sequence)) <= _granted_to(receiver, writer)


def _granted_to(receiver: Receiver, writer: Host) -> set[int]:
    mine: set[int] = set()
    for who, grant in receiver.open_grants():
        if (who.worker_id, who.incarnation) == (writer.worker_id, writer.incarnation):
            mine.update(grant.allocated)
    return mine


def _written(sequence: SequenceStep) -> Iterable[int]:
    first = sequence.start // BLOCK_SIZE
    last = (sequence.start + len(sequence.token_ids) - 1) // BLOCK_SIZE
    begin = sequence.window_first
    windowed = [
        block for table in sequence.window_tables for block in table[first - begin : last + 1 - begin]
    ]
    return [*sequence.block_table[first : last + 1], *windowed]


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise Violation(what)
