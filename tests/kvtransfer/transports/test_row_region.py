"""Rows through shared memory: who may map the region, and what becomes of parts that it does not keep."""

from __future__ import annotations

import asyncio
import mmap
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
import torch

from diptych.worker.v1 import encode_pb2
from kvtransfer.drivers.embedding_link import EmbeddingFingerprint
from kvtransfer.drivers.embedding_server import EmbeddingServer
from kvtransfer.drivers.rows_link import rows_parts
from kvtransfer.protocol.messages import WriterId
from kvtransfer.protocol.row_transfer import Arrival, RowAsks, RowsPart
from kvtransfer.transports.base import TransportError, host_id
from kvtransfer.transports.row_channels import RowsAdmission
from kvtransfer.transports.row_region import (
    SLOT_BYTES,
    SLOTS,
    RegionListener,
    RegionReceiver,
    RegionSender,
    RowRegion,
    open_region,
)

READER, KEY, IMAGE = WriterId("p", 1), ("r", 1), b"i" * 32
FINGERPRINT = EmbeddingFingerprint("m" * 64, "llava", "float32")
ROWS = torch.arange(600 * 512, dtype=torch.float32).view(600, 512)  # two parts


@asynccontextmanager
async def listening() -> AsyncIterator[RegionListener]:
    listener = RegionListener(host_id())
    await listener.start()
    yield listener
    await listener.close()


def admitted(listener: RegionListener, pid: int | None = None) -> RowsAdmission:
    endpoint, token = listener.admit(READER, os.getpid() if pid is None else pid)
    return RowsAdmission("127.0.0.1:1", endpoint, token)


async def both_ends(listener: RegionListener) -> tuple[RegionSender, RegionReceiver]:
    receiver = await open_region(admitted(listener), 4)
    return listener.open_sender(READER), receiver


async def announced(sender: RegionSender, part: RowsPart) -> RowsPart:
    sent = await sender.send(part)
    assert sent is not None
    return sent


async def test_parts_pass_and_their_slots_are_used_again_once_they_were_read() -> None:
    async with listening() as listener:
        sender, receiver = await both_ends(listener)
        asks = RowAsks(4)
        for count in range(SLOTS + 3):
            part = next(iter(rows_parts(asks.ask(KEY, IMAGE), IMAGE, ROWS[:7] + count)))
            verdict, rows = asks.arrive(receiver.locate(await announced(sender, part)))
            assert verdict is Arrival.COMPLETE
            assert rows is not None
            assert bytes(rows.data) == bytes(part.data)
            sender.read(count + 1)


@pytest.mark.parametrize("stale", [False, True])
async def test_a_slot_that_is_written_too_early_does_not_match_its_checksum(stale: bool) -> None:
    async with listening() as listener:
        sender, receiver = await both_ends(listener)
        asks = RowAsks(4)
        generation = asks.ask(KEY, IMAGE)
        part = await announced(sender, next(rows_parts(generation, IMAGE, ROWS)))
        if stale:  # what an encode worker would write that has forgotten who reads
            sender._region.write(part.slot or 0, bytes(64))
        verdict, _ = asks.arrive(receiver.locate(part))
        assert verdict is (Arrival.DAMAGED if stale else Arrival.MORE)


async def test_a_full_region_waits_for_its_reader_and_ends_with_its_link() -> None:
    async with listening() as listener:
        sender, _ = await both_ends(listener)
        part = next(rows_parts(1, IMAGE, ROWS))
        for _ in range(SLOTS):
            await sender.send(part)
        waiting = asyncio.create_task(sender.send(part))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        sender.read(1)
        assert (await announced(sender, part) if waiting.cancelled() else await waiting) is not None
        waiting = asyncio.create_task(sender.send(part))
        await asyncio.sleep(0)
        sender.close()
        with pytest.raises(TransportError, match="closed"):
            await waiting
        with pytest.raises(TransportError, match="counts wrong"):
            sender.read(99)


async def test_a_part_that_fits_no_slot_goes_over_the_stream() -> None:
    async with listening() as listener:
        sender, _ = await both_ends(listener)
        wide = torch.zeros(1, SLOT_BYTES // 4 + 1)
        part = next(rows_parts(1, IMAGE, wide))
        assert await sender.send(part) == part
        assert part.slot is None


async def test_only_the_process_of_the_hello_maps_the_region_and_none_writes_it() -> None:
    async with listening() as listener:
        for pid, token in ((os.getpid() + 1, None), (os.getpid(), bytes(32))):
            admission = admitted(listener, pid)
            if token is not None:
                admission = replace(admission, token=token)
            with pytest.raises(TransportError):
                await open_region(admission, 4)
            with pytest.raises(TransportError, match="did not map"):
                listener.open_sender(READER)
        with pytest.raises(TransportError, match="abstract socket"):
            await open_region(RowsAdmission("", "127.0.0.1:1", b""), 4)
        _, receiver = await both_ends(listener)
        with pytest.raises(TypeError):
            receiver._mapped[0] = 1
        with pytest.raises(TransportError, match="slot"):
            receiver.locate(RowsPart(1, 0, 1, 1, 1, b"", b"", SLOTS))
    region = RowRegion()
    with pytest.raises(PermissionError):
        mmap.mmap(region.export().fds[0], SLOT_BYTES, mmap.MAP_SHARED)


async def test_a_region_that_is_never_opened_is_kept_no_longer_than_its_link() -> None:
    """Also where the reader has mapped it; what another link was offered since stays."""
    async with listening() as listener:
        first = admitted(listener)
        receiver = await open_region(first, 4)
        second = admitted(listener)
        listener.withdraw(READER, first.token)
        assert READER in listener._admitted
        listener.withdraw(READER, second.token)
        assert not listener._admitted
        receiver.close()
    server = EmbeddingServer(
        WriterId("e", 1), FINGERPRINT, on_ask=print, on_taken=print, on_lost=lambda link: None,
        listeners=[RegionListener(host_id())],
    )  # fmt: skip
    await server.start()
    hello = encode_pb2.EmbeddingHello(
        worker_id="p", incarnation=1, pid=os.getpid(), host_id=host_id(), transports=["shared_memory"],
        fingerprint=FINGERPRINT.to_proto(),
    )  # fmt: skip
    await server.serve_link(OneMessage(encode_pb2.EmbeddingServiceLinkRequest(hello=hello)))
    (listener,) = server._listeners.values()
    assert not listener._admitted
    await server.close()


class OneMessage:
    """Stream whose other end sends one message, and ends."""

    def __init__(self, message: object) -> None:
        self._messages: list[object | None] = [message, None]

    async def read(self) -> object | None:
        return self._messages.pop(0)

    async def write(self, message: object) -> None:
        pass


async def test_a_region_outlives_the_encode_worker_and_leaves_no_file_behind() -> None:
    before = len(os.listdir("/proc/self/fd"))
    async with listening() as listener:
        sender, receiver = await both_ends(listener)
        part = await announced(sender, next(rows_parts(1, IMAGE, ROWS)))
        sender.close()
        del sender
        assert bytes(receiver.locate(part).data) == bytes(next(rows_parts(1, IMAGE, ROWS)).data)
        receiver.close()
    assert len(os.listdir("/proc/self/fd")) <= before
