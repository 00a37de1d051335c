"""TCP data socket: unknown peers, damage, replays and late blocks are refused."""

from __future__ import annotations

import asyncio
import random
import socket

import pytest

from diptych.engine.kv.kv_memory import KVMemory
from kvtransfer.protocol.messages import GrantRef, WriterId
from kvtransfer.transports import tcp
from kvtransfer.transports.base import ReceiverHooks, TransportError, Welcome
from kvtransfer.transports.host_blocks import block_digest
from tests.kvtransfer.conftest import LAYOUT, until

SIZE = LAYOUT.bytes_per_block
WRITER = WriterId("w", 1)
REF = GrantRef(("r", 1), 3, 17)


class Sink:
    """Receiver with one open grant of four blocks."""

    def __init__(self) -> None:
        self.memory = KVMemory(LAYOUT, 4)
        self.blocks = [self.memory.block_bytes(block) for block in range(4)]
        self.arrived: list[int] = []
        self.corrupt = 0
        self.dead = 0
        self.open = True
        self.transport = tcp.tcp_receiver(
            "127.0.0.1",
            self.memory,
            ReceiverHooks(
                dead=lambda writer: self.count("dead"),
                resolve=lambda writer, slot, generation: (
                    REF if self.open and (slot, generation) == REF[1:] else None
                ),
                destinations=lambda writer, ref, places: places if places.stop <= 4 else None,
                arrived=lambda writer, ref, index, digests: self.arrived.append(index),
                corrupt=lambda writer, ref: self.count("corrupt"),
            ),
        )

    def count(self, what: str) -> None:
        setattr(self, what, getattr(self, what) + 1)

    def welcome(self, token: bytes) -> Welcome:
        return Welcome("127.0.0.1:1", self.transport.endpoint, token, LAYOUT, 4)


@pytest.fixture
async def sink():
    sink = Sink()
    await sink.transport.start()
    yield sink
    await sink.transport.close()


@pytest.fixture
async def channel(sink):
    channel = await tcp.TcpChannel.open(sink.welcome(sink.transport.admit(WRITER, 0)))
    yield channel
    channel.close()


async def test_damaged_frame_is_reported_and_not_copied(sink, channel):
    rng = random.Random(1)
    payload = rng.randbytes(SIZE)
    damaged = 0
    for number in range(300):
        kind = number % 5
        index, sent, digest = rng.randrange(4), bytearray(payload), block_digest(REF, 0, payload)
        if kind == 0:  # a flipped bit
            sent[rng.randrange(SIZE)] ^= 1 << rng.randrange(8)
            digest = block_digest(REF, index, payload)
        elif kind == 1:  # another place of the same grant
            index = rng.randrange(1, 4)
        elif kind == 2:  # another request's block under this grant's name
            digest = block_digest(REF._replace(key=("other", 1)), index, payload)
        elif kind == 3:  # an earlier generation's block under this one's name
            digest = block_digest(REF._replace(generation=16), index, payload)
        else:  # the end is missing
            sent[-rng.randrange(1, 64) :] = b""
            sent += bytes(SIZE - len(sent))
            digest = block_digest(REF, index, payload)
        if bytes(sent) == payload and digest == block_digest(REF, index, payload):
            continue
        damaged += 1
        await channel.send_block(REF, index, memoryview(sent), digest)
    await until(lambda: sink.corrupt == damaged)
    assert damaged > 250
    assert sink.arrived == []
    assert all(block == bytearray(SIZE) for block in sink.blocks), "nothing damaged touched the pool"
    await channel.send_block(REF, 2, memoryview(payload), block_digest(REF, 2, payload))
    await until(lambda: sink.arrived == [2])
    assert sink.blocks[2] == payload


async def test_frame_of_an_older_generation_is_dropped(sink, channel):
    payload = bytes(range(256)) * (SIZE // 256 + 1)
    payload = payload[:SIZE]
    old = REF._replace(generation=16)
    await channel.send_block(old, 0, memoryview(payload), block_digest(old, 0, payload))
    await channel.send_block(REF, 1, memoryview(payload), block_digest(REF, 1, payload))
    await until(lambda: sink.arrived == [1])
    assert sink.blocks[0] == bytearray(SIZE)
    assert sink.corrupt == 0


async def test_block_of_an_ended_grant_is_not_copied(sink, channel):
    loop = asyncio.get_running_loop()
    payload = bytes([7]) * SIZE
    header = tcp._HEADER.pack(REF.slot, REF.generation, 0, SIZE, block_digest(REF, 0, payload))
    await loop.sock_sendall(channel._connection._connection, header + payload[: SIZE // 2])
    await asyncio.sleep(0.05)
    sink.open = False
    await loop.sock_sendall(channel._connection._connection, payload[SIZE // 2 :])
    await asyncio.sleep(0.05)
    assert sink.blocks[0] == bytearray(SIZE)
    assert sink.arrived == []


async def test_fence_ends_all_copies(sink, channel):
    sink.transport.fence(WRITER)
    assert sink.dead == 1
    payload = bytes(SIZE)

    async def keep_sending() -> None:
        while True:
            await channel.send_block(REF, 0, memoryview(payload), block_digest(REF, 0, payload))
            await asyncio.sleep(0.01)

    with pytest.raises(TransportError):
        await keep_sending()
    assert sink.arrived == []
    assert sink.dead == 1


@pytest.mark.parametrize("fenced", [True, False])
async def test_token_of_a_fenced_writer_is_refused(sink, fenced):
    token = sink.transport.admit(WRITER, 0)
    if not fenced:
        (await tcp.TcpChannel.open(sink.welcome(token))).close()
        return
    sink.transport.fence(WRITER)
    with pytest.raises(TransportError):
        await tcp.TcpChannel.open(sink.welcome(token))


async def test_unknown_or_used_token_is_refused(sink):
    with pytest.raises(TransportError):
        await tcp.TcpChannel.open(sink.welcome(bytes(32)))
    token = sink.transport.admit(WRITER, 0)
    first = await tcp.TcpChannel.open(sink.welcome(token))
    with pytest.raises(TransportError):
        await tcp.TcpChannel.open(sink.welcome(token))
    assert sink.transport.registered(WRITER)
    first.close()
    await until(lambda: sink.dead == 1)


async def test_block_of_a_wrong_size_ends_the_connection(sink, channel):
    await channel.send_block(REF, 0, memoryview(bytes(SIZE - 1)), bytes(16))
    await until(lambda: sink.dead == 1)


async def test_data_connection_sets_tcp_nodelay(channel):
    assert channel._connection._connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
