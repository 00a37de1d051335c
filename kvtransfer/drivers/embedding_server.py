"""Server of the encode worker for prefill workers: asks in, rows out, part by part between heartbeats."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator

import grpc
import torch

from diptych.runtime.failpoints import failpoint, reach
from diptych.runtime.rpc_streams.method import EMBEDDING
from diptych.runtime.rpc_streams.stream import LinkService, Refused, Stream, StreamLost
from diptych.runtime.send_queue import SendQueue
from diptych.worker.v1 import encode_pb2
from kvtransfer.drivers.codec import key_of
from kvtransfer.drivers.embedding_link import EmbeddingFingerprint, Request, Response, hello_of
from kvtransfer.drivers.handshake import incompatible_field
from kvtransfer.drivers.types import Heartbeat
from kvtransfer.protocol.lease import LeaseTimes
from kvtransfer.protocol.messages import Key, WriterId
from kvtransfer.protocol.row_transfer import RowsPart, part_checksum

PART_BYTES = 1 << 20


class RowsLink:
    """Stream of one prefill worker. Rows of several images go out by turns, a part at a time."""

    def __init__(self) -> None:
        self._send_queue: SendQueue[Response | Iterator[Response]] = SendQueue()

    def send_rows(self, generation: int, digest: bytes, rows: torch.Tensor) -> None:
        """Send an image's rows `[rows, width]` for the ask of this generation."""
        self._send_queue.put(_parts(generation, digest, rows))

    def deny(self, generation: int) -> None:
        """Answer an ask whose attempt is not here."""
        self.put(Response(denied=encode_pb2.RowsDenied(generation=generation)))

    def put(self, response: Response) -> None:
        """Send a message after those that were put before; it is dropped once the stream is gone."""
        self._send_queue.put(response)

    def close(self) -> None:
        """Drop what is not sent, and all that is put from now on."""
        self._send_queue.close()

    async def write(self, stream: Stream) -> None:
        """Write until the stream ends."""
        # A stream that cannot be written is broken: the reader sees that too and ends the link.
        with contextlib.suppress(StreamLost):
            while items := await self._send_queue.take():
                for item in items:
                    message = item if isinstance(item, Response) else next(item, None)
                    if message is None:
                        continue
                    await stream.write(message)
                    if not isinstance(item, Response):
                        reach("encode.part")
                        self._send_queue.put(item)


class EmbeddingServer:
    """Serves prefill workers. Callbacks run on the event loop.

    Args:
        on_ask: `on_ask(link, key, digest, generation)`: the link wants an image's rows.
        on_taken: `on_taken(key)`: an attempt needs no more rows.
        on_lost: `on_lost(link)`: a stream has ended.
        heartbeat: state of this worker's engine.
    """

    def __init__(
        self,
        worker: WriterId,
        fingerprint: EmbeddingFingerprint,
        *,
        on_ask: Callable[[RowsLink, Key, bytes, int], None],
        on_taken: Callable[[Key], None],
        on_lost: Callable[[RowsLink], None],
        heartbeat: Callable[[], Heartbeat] = Heartbeat,
        times: LeaseTimes | None = None,
    ) -> None:
        self._worker, self._fingerprint = worker, fingerprint
        self._on_ask, self._on_taken, self._on_lost = on_ask, on_taken, on_lost
        self._heartbeat = heartbeat
        self._interval_s = (times or LeaseTimes()).interval_s
        self._links: set[RowsLink] = set()
        self._tick_task: asyncio.Task[None] | None = None
        self.service = LinkService(EMBEDDING, self.serve_link)

    async def serve_link(self, stream: Stream) -> None:
        """Serve one stream from hello to end. Raises Refused."""
        first = await stream.read()
        if first is None or first.WhichOneof("message") != "hello":
            raise Refused(grpc.StatusCode.INVALID_ARGUMENT, "hello: must be the first message of the stream")
        theirs = EmbeddingFingerprint.from_proto(first.hello.fingerprint)
        if (field := incompatible_field(self._fingerprint, theirs)) is not None:
            raise Refused(grpc.StatusCode.FAILED_PRECONDITION, field)
        if self._tick_task is None:
            self._tick_task = asyncio.create_task(self._tick(), name="embedding-heartbeats")
        link = RowsLink()
        self._links.add(link)
        link.put(Response(welcome=hello_of(self._worker, self._fingerprint)))
        writing = asyncio.create_task(link.write(stream))
        try:
            with contextlib.suppress(StreamLost):
                while (request := await stream.read()) is not None:
                    self._handle(link, request)
        finally:
            self._links.discard(link)
            link.close()
            self._on_lost(link)
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)

    async def close(self) -> None:
        """End the heartbeats; the streams end with their server."""
        if self._tick_task is not None:
            self._tick_task.cancel()
            await asyncio.gather(self._tick_task, return_exceptions=True)

    def _handle(self, link: RowsLink, request: Request) -> None:
        match request.WhichOneof("message"):
            case "ask":
                ask = request.ask
                self._on_ask(link, key_of(ask.id), ask.digest, ask.generation)
            case "taken":
                self._on_taken(key_of(request.taken.id))

    async def _tick(self) -> None:
        while True:
            beat = Response(heartbeat=self._heartbeat().to_proto())
            for link in self._links:
                link.put(beat)
            await asyncio.sleep(self._interval_s)


def _parts(generation: int, digest: bytes, rows: torch.Tensor) -> Iterator[Response]:
    """Yield the parts of an image's rows."""
    total, width = rows.shape
    flat = rows.detach().cpu().contiguous().view(torch.uint8)
    step = max(1, PART_BYTES // flat.shape[1])
    for first in range(0, total, step):
        data = flat[first : first + step].numpy().tobytes()
        part = RowsPart(generation, first, min(step, total - first), total, width, data, b"")
        checksum = part_checksum(digest, part)
        if failpoint("encode.corrupt_part"):
            data = bytes([data[0] ^ 1]) + data[1:]
        yield Response(
            part=encode_pb2.RowsPart(
                generation=part.generation,
                first_row=part.first_row,
                rows=part.rows,
                total_rows=part.total_rows,
                width=part.width,
                data=data,
                checksum=checksum,
            )
        )
