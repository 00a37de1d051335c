"""Memories of a decode worker's ranks that one process of a prefill worker maps, to write its shares."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from diptych.engine.kv.kv_memory import KVMemory
from kvtransfer.protocol.messages import GrantRef
from kvtransfer.transports.base import TransportError
from kvtransfer.transports.fd_passing import register_blocking
from kvtransfer.transports.mapped_pool import MappedPool
from kvtransfer.transports.memory_mapping import ExportedPool, MemoryMapping
from kvtransfer.transports.rank_data import share_digest
from kvtransfer.transports.share_mapping import CopyRun, MapTarget, ShareRun

_NO_GRANT = GrantRef(("", 0), 0, 0)


@dataclass(frozen=True, slots=True)
class _Mapped:
    target: MapTarget
    pool: MappedPool


class MappedTargets:
    """Targets of source `source` of a writer. All calls block: not on the event loop, and one at a time."""

    def __init__(self, source: int, mapping: MemoryMapping) -> None:
        self._source, self._mapping = source, mapping
        self._mapped: list[_Mapped] = []

    def open(self, targets: Sequence[MapTarget]) -> None:
        """Register with each rank and map its memory. Raises TransportError."""
        for target in targets:
            mapped = register_blocking(target, lambda pool, target=target: self._map(pool, target))  # type: ignore[misc]
            try:
                # Reads it once: a GPU's kernel is compiled by that, and known to reach the memory.
                self._mapping.share_hashes(mapped.pool.memory, [0], target.target_pieces, _NO_GRANT, 0)
            except Exception as error:  # of any kind: Triton has errors of its own
                raise TransportError(f"memory of a decode rank cannot be reached: {error}") from error

    def _map(self, pool: ExportedPool, target: MapTarget) -> _Mapped:
        mapped = _Mapped(target, MappedPool(pool, target.layout, target.num_blocks, self._mapping))
        self._mapped.append(mapped)  # also where the rank does not confirm: `close` gives it back
        return mapped

    def copy(self, memory: KVMemory, run: CopyRun, computed: torch.cuda.Event | None = None) -> list[bytes]:
        """Copy this process' shares of blocks of `memory` to every target; return the digests when they lie
        there, each target's after the other's. Raises TransportError.
        """
        upto = run.first + len(run.block_ids)
        begun: list[tuple[_Mapped, Callable[[], list[bytes]]]] = []
        failed: Exception | None = None
        for one in self._mapped:
            shares = ShareRun(
                run.ref, run.first, memory, run.block_ids, one.target.pieces, one.pool.memory, run.target_ids,
                one.target.target_pieces, computed,
            )  # fmt: skip
            try:
                begun.append(
                    (one, self._mapping.start_share_copy(shares, one.pool.flags.word(run.ref, upto)))
                )
            except Exception as error:
                failed = error
                break
        digests: list[bytes] = []
        for one, finish in begun:
            try:
                hashes = finish()
            except Exception as error:
                failed = error  # the others are waited for: what was begun still writes
                continue
            for index, hashed in enumerate(hashes, run.first):
                digests.append(share_digest(run.ref, index, self._source, one.target.target, hashed))
        if failed is not None:
            raise TransportError(f"shares were not copied: {failed}") from failed
        return digests

    def close(self) -> None:
        """Unmap the memories."""
        with contextlib.ExitStack() as stack:  # an error at one page leaves no other open
            for one in self._mapped:
                stack.callback(one.pool.close)
            self._mapped.clear()
