"""The blocks of a rank with memories of its own: what rank 0 has it write, copy and read."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

from diptych.engine.kv.kv_memory import KVMemory
from diptych.worker_process.group.orders import CopyBlock, ReadShare, WriteShare, share_digest


class ShareMemory:
    """The blocks of this rank, and how many writes and copies were carried out."""

    def __init__(self, memories: Mapping[int, KVMemory]) -> None:
        """Take the memories by number, each of this rank's share of blocks."""
        self._memories = memories
        self._carried_out = 0
        self._changed = threading.Condition()

    def carry_out(self, order: WriteShare | CopyBlock) -> None:
        """Write or copy a share of a block. Raises ValueError for bytes that changed on their way."""
        memory = self._memories[order.number]
        if isinstance(order, CopyBlock):
            memory.copy_block(order.src, order.dst)
        elif share_digest(order.payload) != order.digest:
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
            with self._changed:
                while self._carried_out < asked.after:
                    self._changed.wait()
            payload = self._memories[asked.number].block_bytes(asked.block)
            blocks.send_bytes(share_digest(payload))
            blocks.send_bytes(payload)
