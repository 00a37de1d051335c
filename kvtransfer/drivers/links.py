"""Streams between a prefill and a decode worker: hello and welcome, then messages both ways."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Sequence

from diptych.engine.parallel.kv_routes import Holders
from diptych.runtime.internal_tls import InternalTls
from diptych.runtime.rpc_streams.method import HANDOFF
from diptych.runtime.rpc_streams.stream import ClientStream, Stream, StreamLost
from diptych.runtime.send_queue import SendQueue
from diptych.worker.v1 import handoff_pb2
from kvtransfer.drivers.client_link import INCOMPATIBLE, ClientLink, exchange_hello, open_stream
from kvtransfer.drivers.codec import Request, Response
from kvtransfer.drivers.handshake import Fingerprint, incompatible_field
from kvtransfer.drivers.holder_codec import holder_messages
from kvtransfer.protocol.errors import HandoffDenied
from kvtransfer.protocol.messages import WriterId
from kvtransfer.transports.base import host_id

_DECODE = "decode worker"


class PeerLink(ClientLink):
    """Stream of the prefill worker to a decode worker; the meaning of its messages is decided elsewhere."""

    def __init__(
        self, stream: ClientStream, welcome: handoff_pb2.HandoffWelcome, *, shares_drafter: bool = True
    ) -> None:
        super().__init__(stream)
        self.welcome = welcome
        self.shares_drafter = shares_drafter
        """True if blocks have the same segments on both sides; else the model's own alone is handed off."""

    @classmethod
    async def connect(
        cls,
        address: str,
        writer_id: WriterId,
        fingerprint: Fingerprint,
        transports: Sequence[str],
        device: str = "",
        rank_pids: Sequence[int] = (),
        tls: InternalTls | None = None,
        chunk_tokens: int = 0,
        holders: Holders = (),
        holder_devices: Sequence[str] = (),
    ) -> PeerLink:
        """Connect and exchange hello and welcome.

        Args:
            device: UUID of the GPU that holds this worker's blocks, empty for host memory.
            rank_pids: processes of this worker that write blocks, beside this one.
            tls: certificates; None: the link is plain.
            chunk_tokens: most tokens of a prompt that this worker computes at once.
            holders: shares of the processes of this worker that have memories of their own; empty: it sends
                whole blocks.
            holder_devices: UUID of the GPU of each of them, empty for host memory.

        Raises:
            HandoffDenied: the decode worker is not reachable, does not answer or is incompatible.
        """
        hello = handoff_pb2.HandoffHello(
            worker_id=writer_id.worker_id,
            incarnation=writer_id.incarnation,
            pid=os.getpid(),
            fingerprint=fingerprint.to_proto(),
            transports=transports,
            host_id=host_id(),
            device=device,
            rank_pids=rank_pids,
            chunk_tokens=chunk_tokens,
            holders=holder_messages(holders),
            holder_devices=holder_devices,
        )
        stream = await open_stream(address, HANDOFF, tls, _DECODE)
        try:
            welcome = await exchange_hello(stream, Request(hello=hello), _DECODE)
            theirs = Fingerprint.from_proto(welcome.fingerprint)
            field = incompatible_field(fingerprint, theirs)
            if field is not None:
                raise HandoffDenied(INCOMPATIBLE, f"the decode worker differs in {field}")
        except BaseException:
            await stream.close()
            raise
        return cls(stream, welcome, shares_drafter=fingerprint.drafter == theirs.drafter)


class ServerLink:
    """Stream of one prefill worker at the decode worker; the meaning of its messages is decided elsewhere."""

    def __init__(self, writer: WriterId, stream: Stream) -> None:
        self.writer = writer
        self._stream = stream
        self._send_queue: SendQueue[Response] = SendQueue()
        self._task = asyncio.current_task()
        self._closed = False

    def put(self, response: Response) -> None:
        """Send a message after those that were put before; it is dropped once the stream is gone."""
        self._send_queue.put(response)

    def close(self) -> None:
        """End the stream from this side."""
        self._closed = True
        self._send_queue.close()
        if self._task is not None:
            self._task.cancel()

    async def run(self, handle: Callable[[ServerLink, Request], None]) -> None:
        """Pass every message to `handle` until the stream ends."""
        writing = asyncio.create_task(self._write())
        try:
            with contextlib.suppress(StreamLost):
                while (request := await self._stream.read()) is not None:
                    handle(self, request)
        except asyncio.CancelledError:
            if not self._closed:
                raise
        finally:
            self._send_queue.close()
            writing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await writing

    async def _write(self) -> None:
        # A stream that cannot be written is broken: the reader sees that too and ends the link.
        with contextlib.suppress(StreamLost):
            while responses := await self._send_queue.take():
                for response in responses:
                    await self._stream.write(response)


async def read_hello(stream: Stream) -> handoff_pb2.HandoffHello | None:
    """Read the first message; None if it is not a hello. Raises StreamLost."""
    first: Request | None = await stream.read()
    if first is None or first.WhichOneof("message") != "hello":
        return None
    return first.hello
