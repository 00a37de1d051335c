"""The blocks of a rank with memories of its own: what rank 0 has it write, copy and read."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

import torch

from diptych.engine.kv.kv_memory import KVMemory
from diptych.worker_process.group.orders import AwaitWrites, BlockOrder, CopyBlock, PlaceShare, ReadShare
from diptych.worker_process.group.share_arrivals import ShareArrivals
from kvtransfer.transports.blocking import queued_work
from kvtransfer.transports.held_blocks import write_pieces
from kvtransfer.transports.host_blocks import read_block, write_block
from kvtransfer.transports.rank_data import share_hash


class ShareMemory:
    """The blocks of this rank, and how many writes and copies were carried out."""

    def __init__(self, memories: Mapping[int, KVMemory]) -> None:
        """Take the memories by number, each of this rank's share of blocks."""
        self._memories = memories
        self._carried_out = 0
        self._queued: torch.cuda.Event | None = None
        """Event after which a GPU has done the last of them."""
        self._changed = threading.Condition()
        self.arrivals: ShareArrivals | None = None
        """Keeper of shares that other workers sent."""

    def memory(self, number: int, after: int = 0) -> KVMemory:
        """Return a memory once so many writes and copies were carried out, by a GPU as well."""
        with self._changed:
            while self._carried_out < after:
                self._changed.wait()
            queued = self._queued
        if queued is not None:
            queued.synchronize()
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
            write_block(memory, order.block, memoryview(order.payload))
        with self._changed:
            self._queued = queued_work(memory)
            self._carried_out += 1
            self._changed.notify_all()

    def answer(self, blocks: Connection[Any, Any]) -> None:
        """Answer questions for shares until rank 0 is gone. Raises EOFError, OSError."""
        while True:
            asked: ReadShare | AwaitWrites = blocks.recv()
            memory = self.memory(asked.number, asked.after)
            if isinstance(asked, AwaitWrites):
                blocks.send_bytes(b"")
                continue
            payload = read_block(memory, asked.block)
            blocks.send_bytes(share_hash(payload))
            blocks.send_bytes(payload)
