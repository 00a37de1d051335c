"""Prefill worker that takes a grant and never stops writing to it.

Arguments: address, incarnation, transport.
"""

from __future__ import annotations

import asyncio
import os
import sys

from diptych.engine.kv.block_pool import BlockPool
from diptych.engine.kv.kv_memory import KVMemory
from kvtransfer.drivers.client import HandoffClient
from tests.kvtransfer.conftest import FINGERPRINT, LAYOUT


async def main(address: str, incarnation: int, transport: str) -> None:
    client = HandoffClient(
        worker_id="writer",
        incarnation=os.getpid(),
        fingerprint=FINGERPRINT,
        layout=LAYOUT,
        transports=[transport],
        scratch=lambda: (KVMemory(LAYOUT, 8), BlockPool(8)),
        on_abort=lambda key: print("aborted", flush=True),
        on_peer_lost=lambda address, keys: print("lost", flush=True),
    )
    peer = await client.peer(address, incarnation)
    granted = await peer.ask(("r", 1), 10, [])
    print("granted", flush=True)
    value = 0.0
    while True:
        value += 1.0
        granted.memory.data[granted.block_table[0]] = value
        await asyncio.sleep(0)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), sys.argv[3]))
