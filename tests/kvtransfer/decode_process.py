"""Decode worker in a process of its own, which grants one attempt and waits to be killed.

Argument: transport. It prints its address.
"""

from __future__ import annotations

import asyncio
import sys

from diptych.engine.kv.block_pool import BlockPool
from diptych.runtime.rpc import bind, make_server
from diptych.runtime.rpc_streams.grpc_stream import add_links
from kvtransfer.drivers.server import HandoffServer
from kvtransfer.protocol.messages import PendingTransfer
from kvtransfer.transports.pool_memory import allocate_pool
from tests.kvtransfer.conftest import FINGERPRINT, INCARNATION, LAYOUT


async def main(transport: str) -> None:
    server = HandoffServer(
        worker_id="decode",
        incarnation=INCARNATION,
        fingerprint=FINGERPRINT,
        memory=allocate_pool(LAYOUT, 16),
        pool=BlockPool(16),
        transports=[transport],
        running=lambda: 0,
        on_ready=lambda ready: None,
        on_failed=lambda key, reason, message: None,
    )
    await server.start()
    edge = make_server(internal=True)
    add_links(edge, [server.service])
    port = bind(edge, "127.0.0.1", 0, False)
    await edge.start()
    for request in ("r", "waiting"):
        server.expect(PendingTransfer((request, 1), 50 if request == "r" else 60, []))
    print(f"127.0.0.1:{port}", flush=True)
    await asyncio.sleep(120)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
