"""Stream of one prefill worker at an encode worker, and the way of its rows."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator

import torch

from diptych.runtime.failpoints import failpoint, reach
from diptych.runtime.rpc_streams.stream import Stream, StreamLost
from diptych.runtime.send_queue import SendQueue
from diptych.worker.v1 import encode_pb2
from kvtransfer.drivers.embedding_link import Request, Response
from kvtransfer.protocol.row_transfer import RowsPart, part_checksum
from kvtransfer.transports.base import TransportError
from kvtransfer.transports.row_channels import RowSender, StreamSender

PART_BYTES = 1 << 20
_log = logging.getLogger(__name__)


class RowsLink:
    """Messages to a prefill worker, and parts of rows: those of several images go out by turns.

    Parts have a task of their own, so that heartbeats do not wait for a slow way of theirs.
    """

    def __init__(self) -> None:
        self._messages: SendQueue[Response] = SendQueue()
        self._rows: SendQueue[Iterator[RowsPart]] = SendQueue()
        self._sender: RowSender = StreamSender()
        self._stream_free = asyncio.Lock()

    def send_rows(self, generation: int, digest: bytes, rows: torch.Tensor) -> None:
        """Send an image's rows `[rows, width]` for the ask of this generation."""
        self._rows.put(rows_parts(generation, digest, rows))

    def deny(self, generation: int) -> None:
        """Answer an ask whose attempt is not here."""
        self.put(Response(denied=encode_pb2.RowsDenied(generation=generation)))

    def put(self, response: Response) -> None:
        """Send a message after those that were put before; it is dropped once the stream is gone."""
        self._messages.put(response)

    def use(self, sender: RowSender) -> None:
        """Send parts by this way from now on."""
        self._sender.close()
        self._sender = sender

    def read(self, parts: int) -> None:
        """Take the reader's count of parts. Raises TransportError."""
        self._sender.read(parts)

    async def run(self, stream: Stream, handle: Callable[[Request], None]) -> None:
        """Pass every message to `handle` until the stream ends, or the way of its rows does."""
        tasks = [
            asyncio.create_task(task)
            for task in (self._read(stream, handle), self._write(stream), self._send_parts(stream))
        ]
        try:
            done, _ = await asyncio.wait([tasks[0], tasks[2]], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        except TransportError as error:
            _log.warning("the link of a prefill worker for rows ends: %s", error)
        finally:
            self._messages.close()
            self._rows.close()
            self._sender.close()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self, stream: Stream, handle: Callable[[Request], None]) -> None:
        with contextlib.suppress(StreamLost):
            while (request := await stream.read()) is not None:
                handle(request)

    async def _write(self, stream: Stream) -> None:
        # A stream that cannot be written is broken: the reader sees that too and ends the link.
        with contextlib.suppress(StreamLost):
            while responses := await self._messages.take():
                for response in responses:
                    await self._write_one(stream, response)

    async def _send_parts(self, stream: Stream) -> None:
        """Send a part of each image in turn. Raises TransportError."""
        with contextlib.suppress(StreamLost):
            while images := await self._rows.take():
                for parts in images:
                    if (part := next(parts, None)) is None:
                        continue
                    announced = await self._sender.send(part)
                    reach("encode.copied")
                    if announced is not None:
                        await self._write_one(stream, _part_message(announced))
                    reach("encode.part")
                    self._rows.put(parts)

    async def _write_one(self, stream: Stream, response: Response) -> None:
        async with self._stream_free:
            await stream.write(response)


def rows_parts(generation: int, digest: bytes, rows: torch.Tensor) -> Iterator[RowsPart]:
    """Yield the parts of an image's rows `[rows, width]`, which must not change."""
    total, width = rows.shape
    flat = rows.detach().cpu().contiguous().view(torch.uint8)
    step = max(1, PART_BYTES // flat.shape[1])
    for first in range(0, total, step):
        data = memoryview(flat[first : first + step].numpy()).cast("B")  # type: ignore[arg-type]
        part = RowsPart(generation, first, min(step, total - first), total, width, data, b"")
        part = part._replace(checksum=part_checksum(digest, part))
        if failpoint("encode.corrupt_part"):
            part = part._replace(data=bytes([data[0] ^ 1]) + bytes(data[1:]))
        yield part


def _part_message(part: RowsPart) -> Response:
    message = encode_pb2.RowsPart(
        generation=part.generation,
        first_row=part.first_row,
        rows=part.rows,
        total_rows=part.total_rows,
        width=part.width,
        data=bytes(part.data),
        checksum=part.checksum,
        slot=part.slot,
    )
    return Response(part=message)
