"""Writers that are killed, stopped or ignore Abort: their blocks return by proof, and only by proof."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from diptych.runtime.peer_credentials import peer_credentials
from diptych.worker.v1 import work_pb2
from kvtransfer.protocol.lease import LeaseTimes
from kvtransfer.protocol.transfer_table import EscalationTimeouts
from kvtransfer.transports.writer_process import WriterProcess
from tests.kvtransfer.conftest import INCARNATION, until

ROOT = Path(__file__).resolve().parents[3]
QUICK = LeaseTimes(interval_s=0.05, suspect_after_s=0.3, fence_after_s=0.6, relink_grace_s=0.3)


@asynccontextmanager
async def writer_process(address: str, transport: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run a writer in a process of its own, with its grant."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.kvtransfer.writer_process",
        address,
        str(INCARNATION),
        transport,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(60):
            assert await process.stdout.readline() == b"granted\n"
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@pytest.fixture
def quick_pair(make_pair: Callable[..., object]) -> Callable[..., object]:
    return lambda transport: make_pair(transport, lease_times=QUICK)


async def test_killed_writer_returns_its_blocks(quick_pair, transport):
    pair = await quick_pair(transport)
    pair.decode.expect("r", 10)
    async with writer_process(pair.decode.address, transport) as process:
        process.kill()
        await until(lambda: pair.decode.settled() and bool(pair.decode.failed))
    assert pair.decode.failed[0][:2] == (("r", 1), work_pb2.FAILURE_REASON_PEER_LOST)


async def test_stopped_process_is_fenced(quick_pair, transport):
    pair = await quick_pair(transport)
    pair.decode.expect("r", 10)
    async with writer_process(pair.decode.address, transport) as process:
        process.send_signal(signal.SIGSTOP)
        await until(lambda: pair.decode.settled() and bool(pair.decode.failed))
        if transport in ("shared_memory", "cuda_ipc"):
            assert await process.wait() == -signal.SIGKILL, "a mapping can be revoked by death only"
        else:
            process.send_signal(signal.SIGCONT)
        taken = pair.decode.pool.allocate(16)
        before = bytes(pair.decode.memory.memory.block_bytes(taken[0]))
        await asyncio.sleep(0.1)
        assert bytes(pair.decode.memory.memory.block_bytes(taken[0])) == before
        pair.decode.pool.release(taken)


async def test_closed_stream_alone_frees_nothing(make_pair):
    pair = await make_pair("shared_memory")  # with the usual grace of a second
    pair.decode.expect("r", 10)
    async with writer_process(pair.decode.address, "shared_memory") as process:
        (writer,) = pair.decode.server._writers._known.values()
        writer.link.close()
        await until(lambda: bool(pair.decode.failed))
        assert pair.decode.pool.quarantined() == 3
        # It relinks, is asked to stop and does not: it is not killed while it answers, and keeps its blocks.
        await asyncio.sleep(0.5)
        assert process.returncode is None
        assert pair.decode.pool.quarantined() == 3
        process.kill()
        await until(pair.decode.settled)


async def test_writer_that_ignores_abort_is_fenced(make_pair):
    pair = await make_pair("shared_memory", lease_times=QUICK, timeouts=EscalationTimeouts(stop_s=0.3))
    pair.decode.expect("r", 10)
    async with writer_process(pair.decode.address, "shared_memory") as process:
        pair.decode.server.cancel(("r", 1))
        assert await process.wait() == -signal.SIGKILL
        await until(pair.decode.settled)
    assert pair.decode.server.stats().fenced == 1
    assert pair.decode.failed == []


async def test_watch_reports_death_once():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    child = await asyncio.create_subprocess_exec("sleep", "60")
    with ours, theirs:
        assert peer_credentials(ours).pid == os.getpid()
        own = WriterProcess.of_peer(ours)
        with pytest.raises(ValueError, match="itself"):
            own.kill()
        own.close()
    process = WriterProcess(child.pid, os.pidfd_open(child.pid))
    deaths: list[int] = []
    process.watch(lambda: deaths.append(1))
    await asyncio.sleep(0.05)
    assert deaths == []
    process.kill()
    await until(lambda: deaths == [1])
    process.kill()  # no process is hit
    assert await child.wait() == -signal.SIGKILL
