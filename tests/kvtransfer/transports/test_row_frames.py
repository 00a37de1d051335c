"""Rows by frames: who may read them, what a damaged header does, and what is seen on the wire."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from diptych.runtime.internal_tls import InternalTls
from kvtransfer.drivers.rows_link import rows_parts
from kvtransfer.protocol.messages import WriterId
from kvtransfer.protocol.row_transfer import RowsPart
from kvtransfer.transports import row_frames
from kvtransfer.transports.base import TransportError
from kvtransfer.transports.row_channels import RowsAdmission
from kvtransfer.transports.row_frames import (
    HEADER_BYTES,
    FrameListener,
    FrameReceiver,
    frame_header,
    read_header,
)
from tests.diptych.runtime.authority import Authority
from tests.kvtransfer.conftest import until
from tests.kvtransfer.transports.test_data_over_tls import sniffer

READER, IMAGE = WriterId("p", 1), b"i" * 32
ROWS = torch.rand(600, 512)  # two parts


@dataclass
class Prefill:
    """The parts that came, copied, and why no more do."""

    parts: list[RowsPart] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)

    def take(self, part: RowsPart) -> None:
        self.parts.append(part._replace(data=bytes(part.data)))

    async def open(self, admission: RowsAdmission) -> FrameReceiver:
        return await FrameReceiver.open(admission, self.take, self.broken.append)


@asynccontextmanager
async def listening(tls: InternalTls | None = None) -> AsyncIterator[FrameListener]:
    listener = FrameListener("127.0.0.1", tls)
    await listener.start()
    yield listener
    await listener.close()


def admitted(listener: FrameListener, tls: InternalTls | None = None) -> RowsAdmission:
    endpoint, token = listener.admit(READER, 0)
    return RowsAdmission("127.0.0.1:1", endpoint, token, tls)


@pytest.mark.parametrize("at", range(0, HEADER_BYTES, 5))
def test_a_header_with_a_flipped_bit_is_refused(at: int) -> None:
    part = next(rows_parts(7, IMAGE, ROWS))
    header = bytearray(frame_header(part))
    assert read_header(header) == (part._replace(data=b""), len(part.data))
    header[at] ^= 4
    with pytest.raises(TransportError, match="damaged"):
        read_header(header)


async def test_frames_arrive_in_order_and_a_damaged_header_ends_the_socket(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with listening() as listener:
        prefill = Prefill()
        await prefill.open(admitted(listener))
        sender = listener.open_sender(READER)
        expected = [part._replace(data=bytes(part.data)) for part in rows_parts(7, IMAGE, ROWS)]
        for part in rows_parts(7, IMAGE, ROWS):
            await sender.send(part)
        await until(lambda: len(prefill.parts) == 2)
        assert prefill.parts == expected
        monkeypatch.setattr(row_frames, "frame_header", lambda part: bytes(HEADER_BYTES))
        await sender.send(expected[0])
        await until(lambda: bool(prefill.broken))
        assert prefill.broken == ["a frame of rows has a damaged header"]
        assert len(prefill.parts) == 2


async def test_a_reader_without_the_token_or_that_writes_gets_nothing() -> None:
    async with listening() as listener:
        prefill = Prefill()
        admission = admitted(listener)
        with pytest.raises(TransportError):
            await prefill.open(RowsAdmission("", admission.endpoint, bytes(32)))
        with pytest.raises(TransportError, match="no data socket"):
            listener.open_sender(READER)
        receiver = await prefill.open(admission)
        await receiver._connection.send(b"?")
        await until(lambda: bool(prefill.broken))
        with pytest.raises(TransportError):  # a token is good for one socket
            await prefill.open(admission)


@pytest.mark.parametrize("encrypted", [True, False])
async def test_a_listener_on_the_wire_sees_rows_only_without_certificates(
    encrypted: bool, tmp_path: Path
) -> None:
    authority = Authority()
    ends = {
        role: InternalTls(authority.issue(tmp_path / role, role), role) if encrypted else None
        for role in ("encode", "prefill", "decode")
    }
    [piece, *_] = (bytes(part.data)[4096:4128] for part in rows_parts(1, IMAGE, ROWS))
    async with listening(ends["encode"]) as listener:
        prefill, admission = Prefill(), admitted(listener, ends["prefill"])
        if encrypted:
            for wrong in (None, ends["decode"]):
                with pytest.raises(TransportError):
                    await prefill.open(
                        RowsAdmission(admission.address, admission.endpoint, admission.token, wrong)
                    )
        async with sniffer(admission.endpoint) as (endpoint, seen):
            receiver = await prefill.open(
                RowsAdmission(admission.address, endpoint, admission.token, admission.tls)
            )
            sender = listener.open_sender(READER)
            for part in rows_parts(1, IMAGE, ROWS):
                await sender.send(part)
            await until(lambda: len(prefill.parts) == 2)
            assert (piece in seen) is not encrypted
            receiver.close()
            await asyncio.sleep(0)
            sender.close()
