"""Prefill worker in a process of its own that hands prompts off until its input ends.

Arguments: address, incarnation, transport, device. Each line of input is `request tokens seed`; for each it
prints `committed` or `failed`, and `granted` before it writes.
"""

from __future__ import annotations

import asyncio
import os
import sys

import torch

from diptych.engine.kv.block_pool import BlockPool
from diptych.engine.kv.kv_memory import KVMemory
from diptych.worker.v1 import work_pb2
from kvtransfer.drivers.client import HandoffClient
from kvtransfer.protocol.errors import HandoffError
from tests.kvtransfer.conftest import FINGERPRINT, LAYOUT, fill, sampled

BLOCKS = 32


async def main(address: str, incarnation: int, transport: str, device: torch.device) -> None:
    def scratch() -> tuple[KVMemory, BlockPool]:
        on_host = device.type == "cpu"
        memory = KVMemory(LAYOUT, BLOCKS) if on_host else KVMemory.on_device(LAYOUT, BLOCKS, device)
        return memory, BlockPool(BLOCKS)

    if device.type == "cuda":
        torch.zeros(1, device=device)  # as a worker's engine would have: it takes a while, on the event loop
    client = HandoffClient(
        worker_id="prefill",
        incarnation=os.getpid(),
        fingerprint=FINGERPRINT,
        layout=LAYOUT,
        transports=[transport],
        scratch=scratch,
        on_abort=lambda key: report("aborted"),
        on_peer_lost=lambda address, keys: report("lost"),
        device=device,
    )
    while line := await asyncio.to_thread(sys.stdin.readline):
        request, tokens, seed = line.split()
        try:
            await handoff(client, (address, incarnation), request, int(tokens), int(seed))
        except HandoffError as error:
            report(f"failed {error}")
    await client.close()


async def handoff(
    client: HandoffClient, at: tuple[str, int], request: str, num_tokens: int, seed: int
) -> None:
    """Compute a prompt in three chunks, each pushed while the next one is written."""
    peer = await client.peer(*at)
    granted = await peer.ask((request, 1), num_tokens, [])
    report("granted")
    fill(granted, num_tokens, seed)
    for chunk in (1, 2):
        await peer.push(granted, num_tokens * chunk // 3)
        await asyncio.sleep(0)
    committed = await peer.commit(granted, num_tokens, sampled(seed), work_pb2.PhaseTimes())
    report("committed" if committed else "failed")


def report(what: str) -> None:
    print(what, flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), sys.argv[3], torch.device(sys.argv[4])))
