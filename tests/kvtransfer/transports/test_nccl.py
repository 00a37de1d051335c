"""Process-group transport over Gloo: unknown peers, damage, replays and late blocks are refused."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from diptych.engine.kv.kv_memory import KVMemory
from kvtransfer.protocol.messages import GrantRef, WriterId
from kvtransfer.transports import process_group, staging
from kvtransfer.transports.base import ReceiverHooks, Run, TransportError, Welcome
from kvtransfer.transports.data_connection import DataConnection
from kvtransfer.transports.nccl import GREETING, ProcessGroupChannel, process_group_receiver
from tests.kvtransfer.conftest import LAYOUT, until

WRITER = WriterId("w", 1)
REF = GrantRef(("r", 1), 3, 17)
BLOCKS = 12
ROOT = Path(__file__).resolve().parents[3]


class Sink:
    """Receiver with one open grant, whose table is the pool in reverse order."""

    def __init__(self) -> None:
        self.memory = KVMemory(LAYOUT, BLOCKS)
        self.arrived: dict[int, bytes] = {}
        self.corrupt = 0
        self.dead = 0
        self.open = True
        self.transport = process_group_receiver(
            process_group.GLOO,
            "127.0.0.1",
            self.memory,
            ReceiverHooks(
                dead=lambda writer: self.count("dead"),
                resolve=lambda writer, *name: REF if self.open and name == REF[1:] else None,
                destinations=lambda writer, ref, places: self.blocks(places) if self.open else None,
                arrived=lambda writer, ref, first, digests: self.arrived.update(enumerate(digests, first)),
                corrupt=lambda writer, ref: self.count("corrupt"),
            ),
        )

    def blocks(self, places: range) -> list[int]:
        return [BLOCKS - 1 - place for place in places]

    def count(self, what: str) -> None:
        setattr(self, what, getattr(self, what) + 1)

    def welcome(self) -> Welcome:
        return Welcome(
            "127.0.0.1:1", self.transport.endpoint, self.transport.admit(WRITER, 0), LAYOUT, BLOCKS
        )

    @property
    def untouched(self) -> bool:
        return not bool(self.memory.data.any())


def wanted(ref: GrantRef) -> bool:
    return True


@pytest.fixture
async def sink(monkeypatch):
    # Two blocks a slot, so that a run takes several messages and slots are used again.
    monkeypatch.setattr(staging, "blocks_per_slot", lambda block_bytes: 2)
    sink = Sink()
    await sink.transport.start()
    yield sink
    await sink.transport.close()


@pytest.fixture
def scratch() -> KVMemory:
    memory = KVMemory(LAYOUT, BLOCKS)
    for block in range(BLOCKS):
        memory.data[block] = torch.randn(LAYOUT.block_shape, generator=torch.manual_seed(block))
    return memory


@pytest.fixture
async def channel(sink, scratch):
    channel = await ProcessGroupChannel.open(process_group.GLOO, sink.welcome(), scratch)
    yield channel
    channel.close()


async def test_run_longer_than_the_ring_arrives_whole(sink, channel, scratch):
    digests = await channel.send(Run(REF, 1, scratch, range(1, BLOCKS)), wanted)
    await until(lambda: len(sink.arrived) == BLOCKS - 1)
    assert digests == [sink.arrived[index] for index in range(1, BLOCKS)]
    for index in range(1, BLOCKS):
        assert torch.equal(sink.memory.data[BLOCKS - 1 - index], scratch.data[index])
    assert not bool(sink.memory.data[BLOCKS - 1].any())
    assert channel.sent == BLOCKS - 1
    await until(lambda: channel.acknowledged == BLOCKS - 1)


async def test_flipped_bit_is_reported_and_not_copied(sink, channel, scratch, monkeypatch):
    def damaged(payload: memoryview) -> memoryview:
        copy = bytearray(payload)
        copy[7] ^= 16
        return memoryview(copy)

    monkeypatch.setattr(staging, "damage_payload", damaged)
    await channel.send(Run(REF, 0, scratch, [0, 1]), wanted)
    await until(lambda: sink.corrupt == 1)
    assert sink.untouched
    assert sink.arrived == {}


async def test_frame_of_another_request_or_generation_is_dropped(sink, channel, scratch):
    await channel.send(Run(REF._replace(generation=16), 0, scratch, [0]), wanted)
    await channel.send(Run(REF._replace(key=("other", 1)), 0, scratch, [1]), wanted)
    await until(lambda: channel.acknowledged == 2)
    assert sink.corrupt == 1, "the other request's name is in the digest, not in the header"
    assert sink.untouched


async def test_block_of_an_ended_grant_is_not_copied(sink, channel, scratch):
    await channel.send(Run(REF, 0, scratch, [0]), wanted)
    await until(lambda: len(sink.arrived) == 1)
    sink.open = False
    before = sink.memory.data.clone()
    await channel.send(Run(REF, 1, scratch, [1, 2, 3]), wanted)
    await until(lambda: channel.acknowledged == 4)
    assert torch.equal(sink.memory.data, before)


async def test_fence_ends_all_copies(sink, channel, scratch):
    await channel.send(Run(REF, 0, scratch, [0]), wanted)
    await until(lambda: len(sink.arrived) == 1)
    sink.transport.fence(WRITER)
    assert sink.dead == 1
    before = sink.memory.data.clone()
    await until(lambda: channel.broken)
    with pytest.raises(TransportError):
        await asyncio.wait_for(_keep_sending(channel, scratch), 10)
    assert torch.equal(sink.memory.data, before)
    assert sink.dead == 1


async def _keep_sending(channel: ProcessGroupChannel, scratch: KVMemory) -> None:
    while True:
        await channel.send(Run(REF, 1, scratch, range(1, BLOCKS)), wanted)


async def test_send_of_a_revoked_grant_sends_nothing(sink, channel, scratch):
    left = iter([True, False])
    assert await channel.send(Run(REF, 0, scratch, range(8)), lambda ref: next(left)) is None
    assert channel.sent == 2


async def test_join_without_the_secret_ends_the_group(sink, scratch):
    connection = await DataConnection.open(sink.welcome(), GREETING.size)
    port, secret = GREETING.unpack(connection.greeting)
    connection.greeting = GREETING.pack(port, bytes(len(secret)))
    stranger = ProcessGroupChannel(process_group.GLOO, connection, "127.0.0.1", scratch)
    await until(lambda: sink.dead == 1, 10.0)
    stranger.close()


@pytest.mark.parametrize("count", [0, 3, 1 << 31])
async def test_frame_of_a_wrong_size_ends_the_group(sink, channel, count):
    await channel._connection.send(b"\0" * 16 + count.to_bytes(4, "little"))
    await until(lambda: sink.dead == 1)


async def test_receive_from_a_frozen_peer_times_out(monkeypatch):
    """The receive of a message that never comes ends by itself, and no event loop waits for it."""
    monkeypatch.setattr(process_group, "TRANSFER_S", 0.5)
    listener, port = process_group.listen_for_store("127.0.0.1")
    script = (
        "import sys, time, torch; from kvtransfer.transports import process_group;"
        "store = process_group.open_store('127.0.0.1', int(sys.argv[1]), None);"
        "group = process_group.build('gloo', store, 1, '127.0.0.1', torch.device('cpu'));"
        "print('joined', flush=True); time.sleep(60)"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, str(port), cwd=ROOT, stdout=subprocess.PIPE
    )
    try:
        store = await asyncio.to_thread(process_group.open_store, "127.0.0.1", port, listener)
        cpu = torch.device("cpu")
        group = await asyncio.to_thread(process_group.build, process_group.GLOO, store, 0, "127.0.0.1", cpu)
        assert process.stdout is not None
        await process.stdout.readline()
        os.kill(process.pid, signal.SIGSTOP)
        with pytest.raises(TransportError, match="Gloo"):
            await asyncio.to_thread(group.receive, torch.empty(64, dtype=torch.uint8))
        with pytest.raises(TransportError):
            await asyncio.to_thread(group.receive, torch.empty(64, dtype=torch.uint8))
    finally:
        process.kill()
        await process.wait()


def test_nccl_is_refused_on_the_cpu():
    assert process_group.nccl_unusable_reason(torch.device("cpu")) == "its blocks must be on a GPU"


async def test_group_that_is_never_built_ends_the_connection(sink, scratch, monkeypatch):
    """A writer that shows its token and never joins the group, as one that hangs while it builds."""
    monkeypatch.setattr(process_group, "BUILD_S", 0.3)
    monkeypatch.setattr(process_group, "TRANSFER_S", 0.3)
    connection = await DataConnection.open(sink.welcome(), GREETING.size)
    await until(lambda: sink.dead == 1)
    await until(lambda: connection.broken)
    connection.close()
