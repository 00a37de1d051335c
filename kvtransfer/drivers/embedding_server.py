"""Server of the encode worker for prefill workers: asks in, rows out, part by part between heartbeats."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

import grpc

from diptych.runtime.rpc_streams.method import EMBEDDING
from diptych.runtime.rpc_streams.stream import LinkService, Refused, Stream
from diptych.worker.v1 import encode_pb2
from kvtransfer.drivers.codec import key_of
from kvtransfer.drivers.embedding_link import EmbeddingFingerprint, Request, Response, hello_of
from kvtransfer.drivers.handshake import incompatible_field
from kvtransfer.drivers.rows_link import RowsLink
from kvtransfer.drivers.types import Heartbeat
from kvtransfer.protocol.lease import LeaseTimes
from kvtransfer.protocol.messages import Key, WriterId
from kvtransfer.transports.row_channels import RowListener

_log = logging.getLogger(__name__)


class EmbeddingServer:
    """Serves prefill workers. Callbacks run on the event loop.

    Args:
        on_ask: `on_ask(link, key, digest, generation)`: the link wants an image's rows.
        on_taken: `on_taken(key)`: an attempt needs no more rows.
        on_lost: `on_lost(link)`: a stream has ended.
        heartbeat: state of this worker's engine.
        listeners: ways of rows beside the streams; without any they go over these.
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
        listeners: Sequence[RowListener] = (),
    ) -> None:
        self._worker, self._fingerprint = worker, fingerprint
        self._listeners = {listener.name: listener for listener in listeners}
        self._on_ask, self._on_taken, self._on_lost = on_ask, on_taken, on_lost
        self._heartbeat = heartbeat
        self._interval_s = (times or LeaseTimes()).interval_s
        self._links: set[RowsLink] = set()
        self._tick_task: asyncio.Task[None] | None = None
        self.service = LinkService(EMBEDDING, self.serve_link)

    async def start(self) -> None:
        """Listen for the ways of rows. Call it before the gRPC server starts. Raises OSError."""
        for listener in self._listeners.values():
            await listener.start()

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
        reader = WriterId(first.hello.worker_id, first.hello.incarnation)
        listener, channel = self._offer(first.hello, reader)
        welcome = hello_of(self._worker, self._fingerprint)
        welcome.channel.MergeFrom(channel)
        link = RowsLink()
        self._links.add(link)
        link.put(Response(welcome=welcome))

        def handle(request: Request) -> None:
            if request.WhichOneof("message") == "opened" and listener is not None:
                link.use(listener.open_sender(reader))
            else:
                self._handle(link, request)

        try:
            await link.run(stream, handle)
        finally:
            self._links.discard(link)
            if listener is not None:
                listener.withdraw(reader, channel.token)
            self._on_lost(link)

    async def close(self) -> None:
        """End the heartbeats and the ways of rows; the streams end with their server."""
        if self._tick_task is not None:
            self._tick_task.cancel()
            await asyncio.gather(self._tick_task, return_exceptions=True)
        for listener in self._listeners.values():
            await listener.close()

    def _offer(
        self, hello: encode_pb2.EmbeddingHello, reader: WriterId
    ) -> tuple[RowListener | None, encode_pb2.RowsChannel]:
        """Return the first way of a hello that reaches its process, and what the welcome says of it."""
        for name in hello.transports:
            listener = self._listeners.get(name)
            if listener is None or not listener.reaches(hello.host_id):
                continue
            try:
                endpoint, token = listener.admit(reader, hello.pid)
            except OSError as error:
                _log.warning("no %s for rows to %s: %s", name, reader.worker_id, error)
                continue
            return listener, encode_pb2.RowsChannel(transport=name, endpoint=endpoint, token=token)
        return None, encode_pb2.RowsChannel()

    def _handle(self, link: RowsLink, request: Request) -> None:
        match request.WhichOneof("message"):
            case "ask":
                ask = request.ask
                self._on_ask(link, key_of(ask.id), ask.digest, ask.generation)
            case "taken":
                self._on_taken(key_of(request.taken.id))
            case "read":
                link.read(request.read.parts)

    async def _tick(self) -> None:
        while True:
            beat = Response(heartbeat=self._heartbeat().to_proto())
            for link in self._links:
                link.put(beat)
            await asyncio.sleep(self._interval_s)
