"""Whole blocks of a group whose ranks have memories of their own: gathered, scattered and copied by rank 0.

    gather   own shares from own memory, the rest from the ranks that hold them: what a handoff sends
    scatter  each rank's share of what a handoff brought, among the plans of steps: a step that reads a block
             comes after its bytes, and bytes for a block that was freed come before whatever is written next

So the protocol of the handoff, its grants, digests and promises, is that of single processes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from diptych.engine.kv.kv_memory import KVMemory
from diptych.engine.parallel.kv_shares import KVShare
from diptych.worker_process.group.remote_rank import RemoteRank
from kvtransfer.transports.host_blocks import host_view


class SpreadShares:
    """The shares of one memory's blocks; see `SpreadBlocks`.

    Args:
        memory: rank 0's, in which all processes of its host write their shares of whole blocks.
        number: the memory's number in plans.
        own: shares that are in `memory`.
        others: ranks with memories of their own, and their shares.
    """

    def __init__(
        self,
        memory: KVMemory,
        number: int,
        own: Sequence[KVShare],
        others: Sequence[tuple[RemoteRank, KVShare]],
    ) -> None:
        self._data, self._shape, self._dtype = memory.data, memory.layout.block_shape, memory.layout.dtype
        self._number, self._own, self._others = number, own, others

    def gather_block(self, block: int) -> memoryview:
        """See `SpreadBlocks.gather_block`. Ends the process where a rank does not answer."""
        whole = torch.zeros(self._shape, dtype=self._dtype)
        for share in self._own:
            share.of(whole).copy_(share.of(self._data[block]))
        for rank, share in self._others:
            target = share.of(whole)
            payload = rank.read_share(self._number, block)
            target.copy_(torch.frombuffer(payload, dtype=self._dtype).view(target.shape))
        return _bytes_of(whole)

    def scatter_block(self, block: int, payload: memoryview) -> None:
        """See `SpreadBlocks.scatter_block`."""
        whole = torch.frombuffer(payload, dtype=self._dtype).view(self._shape)
        for share in self._own:
            share.of(self._data[block]).copy_(share.of(whole))
        for rank, share in self._others:
            rank.write_share(self._number, block, bytes(_bytes_of(share.of(whole))))

    def copy_block(self, src: int, dst: int) -> None:
        """See `SpreadBlocks.copy_block`."""
        for share in self._own:
            share.of(self._data[dst]).copy_(share.of(self._data[src]))
        for rank, _ in self._others:
            rank.copy_block(self._number, src, dst)


def _bytes_of(numbers: torch.Tensor) -> memoryview:
    return host_view(numbers.flatten().view(torch.uint8))
