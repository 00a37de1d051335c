"""The blocks of a rank with memories of its own: what rank 0 has it write, copy and read."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

from diptych.engine.kv.kv_memory import KVMemory
from diptych.worker_process.group.orders import BlockOrder, CopyBlock, PlaceShare, ReadShare
from diptych.worker_process.group.share_arrivals import ShareArrivals
from kvtransfer.transports.rank_data import share_hash, write_pieces


class ShareMemory:
    """The blocks of this rank, and how many writes and copies were carried out."""

    def __init__(self, memories: Mapping[int, KVMemory]) -> None:
        """Take the memories by number, each of this rank's share of blocks."""
        self._memories = memories
        self._carried_out = 0
        self._changed = threading.Condition()
        self.arrivals: ShareArrivals | None = None
        """Keeper of shares that other workers sent."""

    def memory(self, number: int, after: int = 0) -> KVMemory:
        """Return a memory once so many writes and copies were carried out."""
        with self._changed:
            while self._carried_out < after:
                self._changed.wait()
        return self._memories[number]

    def carry_out(self, order: BlockOrder) -> None:
        """Write or copy a share of a block. Raises ValueError for bytes that changed on their way."""
        memory = self._memories[order.number]
        if isinstance(order, CopyBlock):
            memory.copy_block(order.src, order.dst)
        elif isinstance(order, PlaceShare):
            if self.arrivals is None:
                raise ValueError("a share is to be placed, and none was kept")
            write_pieces(memory, order.block, order.pieces, self.arrivals.take(order.staged))
        elif share_hash(order.payload) != order.digest:
            raise ValueError(f"the share of block {order.block} was damaged on its way")
        else:
            memory.block_bytes(order.block)[:] = order.payload
        with self._changed:
            self._carried_out += 1
            self._changed.notify_all()

    def answer(self, blocks: Connection[Any, Any]) -> None:
        """Answer questions for shares until rank 0 is gone. Raises EOFError, OSError."""
        while True:
            asked: ReadShare = blocks.recv()
            payload = self.memory(asked.number, asked.after).block_bytes(asked.block)
            blocks.send_bytes(share_hash(payload))
            blocks.send_bytes(payload)
