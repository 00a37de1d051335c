"""Death or freeze of the decode process under a prefill worker, by every transport: no call hangs."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from diptych.engine.kv.block_pool import BlockPool
from diptych.engine.kv.kv_memory import KVMemory
from kvtransfer.drivers.client import HandoffClient
from kvtransfer.protocol.errors import HandoffDenied, PeerLost
from tests.kvtransfer.conftest import FINGERPRINT, INCARNATION, LAYOUT, fill, until

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.full)])
async def test_lost_decode_worker_ends_grants_and_asks(transport, how):
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.kvtransfer.decode_process", transport),
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
    )
    lost: list[str] = []
    scratch = BlockPool(64)
    client = HandoffClient(
        worker_id="prefill",
        incarnation=3,
        fingerprint=FINGERPRINT,
        layout=LAYOUT,
        transports=[transport],
        scratch=lambda: (KVMemory(LAYOUT, 64), scratch),
        on_abort=lambda key: None,
        on_peer_lost=lambda address, keys: lost.extend(request for request, _ in keys),
    )
    try:
        assert process.stdout is not None
        address = (await asyncio.wait_for(process.stdout.readline(), 30)).decode().strip()
        peer = await client.peer(address, INCARNATION)
        granted = await peer.ask(("r", 1), 50, [])
        waiting = asyncio.create_task(peer.ask(("waiting", 1), 60, []))
        fill(granted, 50, 1)
        await peer.push(granted, 30)
        await asyncio.sleep(0.05)
        process.send_signal(how)
        fill(granted, 50, 1)  # a mapped pool outlives its owner
        async with asyncio.timeout(60):
            await peer.push(granted, 49)
            with pytest.raises(PeerLost):
                await waiting
            await until(lambda: lost == ["r"])
            await peer.stop(granted)
            await until(lambda: scratch.available() == 64)
        if how is signal.SIGKILL:
            with pytest.raises(HandoffDenied):
                await client.peer(address, INCARNATION)
    finally:
        await client.close()
        if process.returncode is None:
            process.kill()
        await process.wait()
