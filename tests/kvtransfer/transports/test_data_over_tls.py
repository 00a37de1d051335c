"""Data sockets with certificates: what a listener on the wire sees, who may write, and a renewal."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from diptych.engine.kv.kv_memory import KVMemory
from diptych.runtime.internal_tls import InternalTls
from kvtransfer.protocol.messages import GrantRef, WriterId
from kvtransfer.transports import tcp
from kvtransfer.transports.base import Locality, ReceiverHooks, TransportError, Welcome
from kvtransfer.transports.host_blocks import block_digest
from kvtransfer.transports.nccl import process_group_receiver
from tests.diptych.runtime.authority import Authority
from tests.kvtransfer.conftest import LAYOUT, until

SIZE = LAYOUT.bytes_per_block
WRITER = WriterId("w", 1)
REF = GrantRef(("r", 1), 3, 17)
PIECE = 32  # bytes of a block that are looked for on the wire


class Decode:
    """Receiving end with one open grant, which notes what arrived."""

    def __init__(self, tls: InternalTls | None) -> None:
        self.memory = KVMemory(LAYOUT, 4)
        self.arrived: list[int] = []
        self.hooks = ReceiverHooks(
            dead=lambda writer: None,
            resolve=lambda writer, slot, generation: REF if (slot, generation) == REF[1:] else None,
            destinations=lambda writer, ref, places: places,
            arrived=lambda writer, ref, index, digests: self.arrived.append(index),
            corrupt=lambda writer, ref: pytest.fail("corrupt"),
        )
        self.transport = tcp.tcp_receiver("127.0.0.1", self.memory, self.hooks, tls)

    def welcome(self, tls: InternalTls | None) -> Welcome:
        token = self.transport.admit(WRITER, 0)
        return Welcome("127.0.0.1:1", self.transport.endpoint, token, LAYOUT, 4, tls=tls)


@asynccontextmanager
async def decode_end(tls: InternalTls | None) -> AsyncIterator[Decode]:
    end = Decode(tls)
    await end.transport.start()
    yield end
    await end.transport.close()


@asynccontextmanager
async def sniffer(endpoint: str) -> AsyncIterator[tuple[str, bytearray]]:
    """Address that passes everything on to `endpoint`, and the bytes that went either way."""
    seen = bytearray()
    serving: set[asyncio.Task[None]] = set()

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            seen.extend(data)
            writer.write(data)
            await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        serving.add(task)
        host, _, port = endpoint.rpartition(":")
        there, back = await asyncio.open_connection(host, int(port))
        await asyncio.gather(copy(reader, back), copy(there, writer), return_exceptions=True)
        for end in (back, writer):
            end.close()
            with contextlib.suppress(OSError):
                await end.wait_closed()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}", seen
    server.close()
    await asyncio.wait_for(asyncio.gather(*serving), 20)


@pytest.mark.parametrize("encrypted", [True, False])
async def test_blocks_are_on_the_wire_in_plain_only_without_certificates(
    encrypted: bool, tmp_path: Path
) -> None:
    authority = Authority()
    decode = InternalTls(authority.issue(tmp_path / "d", "decode"), "decode") if encrypted else None
    prefill = InternalTls(authority.issue(tmp_path / "p", "prefill"), "prefill") if encrypted else None
    payload = random.Random(1).randbytes(SIZE)
    async with decode_end(decode) as end, sniffer(end.transport.endpoint) as (address, seen):
        welcome = replace(end.welcome(prefill), endpoint=address)
        channel = await tcp.TcpChannel.open(welcome)
        for index in range(4):
            await channel.send_block(REF, index, memoryview(payload), block_digest(REF, index, payload))
        await until(lambda: end.arrived == [0, 1, 2, 3])
        await until(lambda: channel.acknowledged == 4)
        channel.close()
        assert all(end.memory.block_bytes(block) == payload for block in range(4))
    assert len(seen) > 4 * SIZE
    pieces = [payload[at : at + PIECE] for at in range(0, SIZE - PIECE, PIECE)]
    plain = [piece in seen for piece in (*pieces, welcome.token)]
    assert not any(plain) if encrypted else all(plain)


async def test_writers_of_another_ca_role_or_none_get_no_data_connection(tmp_path: Path) -> None:
    authority = Authority()
    gateway = InternalTls(authority.issue(tmp_path / "g", "gateway"), "gateway")
    strange = InternalTls(Authority().issue(tmp_path / "s", "prefill"), "prefill")
    async with decode_end(InternalTls(authority.issue(tmp_path / "d", "decode"), "decode")) as end:
        for tls in (gateway, strange, None):
            with pytest.raises(TransportError):
                await tcp.TcpChannel.open(end.welcome(tls))
            assert not end.transport.registered(WRITER)


async def test_a_decode_worker_of_another_ca_is_sent_nothing(tmp_path: Path) -> None:
    prefill = InternalTls(Authority().issue(tmp_path / "p", "prefill"), "prefill")
    strange = InternalTls(Authority().issue(tmp_path / "s", "decode"), "decode")
    for theirs in (strange, None):
        async with decode_end(theirs) as end:
            with pytest.raises(TransportError):
                await tcp.TcpChannel.open(end.welcome(prefill))


async def test_renewed_files_serve_new_data_connections_and_old_ones_stay(tmp_path: Path) -> None:
    authority = Authority()
    prefill = InternalTls(authority.issue(tmp_path / "p", "prefill"), "prefill")
    payload = bytes(SIZE)
    async with decode_end(InternalTls(authority.issue(tmp_path / "d", "decode"), "decode")) as end:
        first = await tcp.TcpChannel.open(end.welcome(prefill))
        fresh = Authority()
        fresh.issue(tmp_path / "d", "prefill")
        await asyncio.sleep(1.2)
        old = await tcp.TcpChannel.open(end.welcome(prefill))  # what no writer would take changes nothing
        first.close()
        fresh.issue(tmp_path / "d", "decode")
        await asyncio.sleep(1.2)
        with pytest.raises(TransportError):  # control: the certificate is another one
            await tcp.TcpChannel.open(replace(end.welcome(prefill), token=bytes(32)))
        await old.send_block(REF, 0, memoryview(payload), block_digest(REF, 0, payload))
        await until(lambda: old.acknowledged == 1)
        fresh.issue(tmp_path / "p", "prefill")
        await asyncio.sleep(1.2)
        new = await tcp.TcpChannel.open(end.welcome(prefill))
        await new.send_block(REF, 1, memoryview(payload), block_digest(REF, 1, payload))
        await until(lambda: new.acknowledged == 1)
        old.close()
        new.close()


@pytest.mark.parametrize("allowed", [False, True])
async def test_groups_leave_the_host_beside_certificates_only_where_allowed(
    allowed: bool, tmp_path: Path
) -> None:
    folder = Authority().issue(tmp_path / "d", "decode")
    tls = InternalTls(folder, "decode", plain_groups=allowed)
    receiver = process_group_receiver("gloo", "127.0.0.1", KVMemory(LAYOUT, 4), Decode(None).hooks, tls)
    why = receiver.unreachable_reason(Locality("another host"))
    assert why is None if allowed else why is not None and "--insecure-kv-network" in why
