"""A writer of several processes: registered when all are, dead when none is left, fenced as one."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator

import pytest

from kvtransfer.protocol.messages import WriterId
from kvtransfer.transports.base import RankedReceiver, ReceiverHooks, TransportError, Welcome, host_id
from kvtransfer.transports.fd_passing import register
from kvtransfer.transports.memory_mapping import HostMapping
from kvtransfer.transports.pool_memory import allocate_pool
from kvtransfer.transports.shared_memory import SharedMemoryReceiver
from tests.kvtransfer.conftest import LAYOUT, until

WRITER = WriterId("w", 1)
RANK = """
import sys, time
from kvtransfer.transports.base import Welcome, host_id
from kvtransfer.transports.fd_passing import register_blocking
from kvtransfer.transports.memory_mapping import HostMapping
from tests.kvtransfer.conftest import LAYOUT
endpoint, token = sys.stdin.readline().split()
welcome = Welcome("127.0.0.1:1", endpoint, bytes.fromhex(token), LAYOUT, 4)
memory = register_blocking(welcome, lambda pool: HostMapping(host_id()).map(pool, LAYOUT, 4))
print("mapped", flush=True)
time.sleep(600)
"""


class Receiving:
    """A receiver, and the ranks of one writer as processes."""

    def __init__(self, ranks: int) -> None:
        self.dead: list[WriterId] = []
        hooks = ReceiverHooks(
            self.dead.append, lambda *a: None, lambda *a: None, lambda *a: None, lambda *a: None
        )
        pool = allocate_pool(LAYOUT, 4)
        self.receiver = SharedMemoryReceiver("shared_memory", pool, HostMapping(host_id()), hooks)
        self.ranks = [
            subprocess.Popen(
                [sys.executable, "-c", RANK], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            for _ in range(ranks)
        ]

    async def register(self, rank: int, token: bytes) -> None:
        process = self.ranks[rank]
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(f"{self.receiver.endpoint} {token.hex()}\n")
        process.stdin.flush()
        assert await asyncio.to_thread(process.stdout.readline) == "mapped\n"

    def kill(self, rank: int) -> None:
        os.kill(self.ranks[rank].pid, signal.SIGKILL)
        self.ranks[rank].wait()


@pytest.fixture
async def pair() -> AsyncIterator[Receiving]:
    pair = Receiving(2)
    await pair.receiver.start()
    yield pair
    await pair.receiver.close()
    for process in pair.ranks:
        with process:  # closes its pipes
            process.kill()


async def test_a_writer_is_registered_with_its_last_rank_and_dead_with_its_last_rank(pair: Receiving) -> None:
    receiver = pair.receiver
    assert isinstance(receiver, RankedReceiver)
    tokens = receiver.admit_ranks(WRITER, [rank.pid for rank in pair.ranks])
    await pair.register(0, tokens[0])
    assert not receiver.registered(WRITER)
    await pair.register(1, tokens[1])
    await until(lambda: receiver.registered(WRITER))
    pair.kill(0)
    await until(lambda: not receiver.registered(WRITER))
    await asyncio.sleep(0.2)
    assert pair.dead == [], "the other rank may still write"
    pair.kill(1)
    await until(lambda: pair.dead == [WRITER])


async def test_a_fence_kills_every_rank(pair: Receiving) -> None:
    tokens = pair.receiver.admit_ranks(WRITER, [rank.pid for rank in pair.ranks])
    for rank, token in enumerate(tokens):
        await pair.register(rank, token)
    await until(lambda: pair.receiver.registered(WRITER))
    os.kill(pair.ranks[1].pid, signal.SIGSTOP)
    pair.receiver.fence(WRITER)
    await until(lambda: pair.dead == [WRITER])
    assert [rank.wait() for rank in pair.ranks] == [-signal.SIGKILL] * 2


async def test_a_ranks_token_is_no_other_processs_token() -> None:
    alone = Receiving(0)
    await alone.receiver.start()
    tokens = alone.receiver.admit_ranks(WRITER, [os.getppid(), os.getpid()])
    for token, refused in ((tokens[0], True), (tokens[1], False)):
        welcome = Welcome("127.0.0.1:1", alone.receiver.endpoint, token, LAYOUT, 4)
        with pytest.raises(TransportError) if refused else contextlib.nullcontext():
            await register(welcome, lambda pool: HostMapping(host_id()).map(pool, LAYOUT, 4))
    assert not alone.receiver.registered(WRITER), "the other rank has not come"
    await alone.receiver.close()
