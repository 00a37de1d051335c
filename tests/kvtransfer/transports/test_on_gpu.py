"""Every transport between blocks on a real GPU, with the writer in a process of its own."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch

from diptych.engine.kv.block_pool import BlockPool
from diptych.engine.kv.kv_memory import KVMemory
from diptych.worker.v1 import work_pb2
from kvtransfer.drivers.server import HandoffServer
from kvtransfer.protocol.lease import LeaseTimes
from kvtransfer.transports import process_group
from kvtransfer.transports.pool_memory import PoolMemory
from tests.kvtransfer.conftest import FINGERPRINT, INCARNATION, LAYOUT, DecodeEnd, pattern, until

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).resolve().parents[3]
BLOCKS = 16
QUICK = LeaseTimes(interval_s=0.05, suspect_after_s=0.3, fence_after_s=0.6, relink_grace_s=0.3)


@pytest.fixture(params=["cuda_shared", "cuda_ipc", "tcp", "gloo", "nccl"])
def gpu_transport(request: pytest.FixtureRequest) -> str:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    if request.param == "nccl" and writer_device("nccl") == "cuda:0":
        version = torch.cuda.nccl.version()
        if version < process_group.SHARED_GPU_SINCE:
            pytest.skip(f"one GPU, and NCCL {version} wants one for each rank")
    return str(request.param)


def writer_device(transport: str) -> str:
    """Return another GPU where that is possible and there is one."""
    several = torch.cuda.device_count() > 1 and transport != "cuda_shared"
    return "cuda:1" if several else "cuda:0"


@asynccontextmanager
async def decode_end(transport: str) -> AsyncIterator[DecodeEnd]:
    memory = KVMemory.on_device(LAYOUT, BLOCKS, torch.device("cuda", 0))
    end = DecodeEnd(BlockPool(BLOCKS), PoolMemory(memory, None))
    end.server = HandoffServer(
        worker_id="decode",
        incarnation=INCARNATION,
        fingerprint=FINGERPRINT,
        memory=end.memory,
        pool=end.pool,
        transports=[transport],
        running=lambda: 0,
        on_ready=end.ready.append,
        on_failed=lambda *failure: end.failed.append(failure),
        lease_times=QUICK,
    )
    await end.server.start()
    await end.listen()
    try:
        yield end
    finally:
        await end.server.close()
        await end.grpc.stop(None)


@asynccontextmanager
async def writer(address: str, transport: str) -> AsyncIterator[asyncio.subprocess.Process]:
    arguments = [address, str(INCARNATION), transport, writer_device(transport)]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.kvtransfer.prefill_process", *arguments),
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def said(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    return (await asyncio.wait_for(process.stdout.readline(), 120)).decode().strip()


async def test_commit_hands_off_the_blocks_as_written(gpu_transport):
    rng = random.Random(3)
    async with decode_end(gpu_transport) as end, writer(end.address, gpu_transport) as process:
        assert process.stdin is not None
        for seed, num_tokens in enumerate([1, 3, 4, 5, 22, 50], 1):
            taken = end.pool.allocate(BLOCKS)
            rng.shuffle(taken)
            end.pool.release(taken)
            key = end.expect(f"r{seed}", num_tokens)
            process.stdin.write(f"{key[0]} {num_tokens} {seed}\n".encode())
            assert await said(process) == "granted"
            assert await said(process) == "committed"
            await until(lambda expected=seed: len(end.ready) == expected, 30.0)
            ready = end.ready[-1]
            assert ready.transport == gpu_transport
            for place, block in enumerate(ready.block_ids):
                assert torch.equal(end.memory.memory.data[block].cpu(), pattern(seed, place))
            end.pool.release(ready.block_ids)
        assert end.settled()
        assert end.failed == []


async def test_killed_writer_returns_its_blocks(gpu_transport):
    async with decode_end(gpu_transport) as end, writer(end.address, gpu_transport) as process:
        assert process.stdin is not None
        end.expect("r", 50)
        process.stdin.write(b"r 50 1\n")
        assert await said(process) == "granted"
        process.kill()
        await until(lambda: bool(end.failed or end.ready), 10.0)
        if end.ready:  # it was quick
            end.pool.release(end.ready[0].block_ids)
        else:
            assert end.failed[0][1] == work_pb2.FAILURE_REASON_PEER_LOST
        await until(end.settled, 10.0)
