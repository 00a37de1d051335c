"""One prefill worker's stream at the decode worker: hello, then messages both ways."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from diptych.runtime.rpc_streams.stream import Stream, StreamLost
from diptych.runtime.send_queue import SendQueue
from diptych.worker.v1 import handoff_pb2
from kvtransfer.drivers.codec import Request, Response
from kvtransfer.protocol.messages import WriterId


class ServerLink:
    """The I/O of one stream; what its messages mean is decided elsewhere."""

    def __init__(self, writer: WriterId, stream: Stream) -> None:
        self.writer = writer
        self._stream = stream
        self._outbox: SendQueue[Response] = SendQueue()
        self._task = asyncio.current_task()
        self._closed = False

    def put(self, response: Response) -> None:
        """Send it after what was put before; dropped when the stream is gone."""
        self._outbox.put(response)

    def close(self) -> None:
        """End the stream from our side."""
        self._closed = True
        self._outbox.close()
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
            self._outbox.close()
            writing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await writing

    async def _write(self) -> None:
        # A stream that cannot be written is broken: the reader sees that too and ends the link.
        with contextlib.suppress(StreamLost):
            while responses := await self._outbox.take():
                for response in responses:
                    await self._stream.write(response)


async def read_hello(stream: Stream) -> handoff_pb2.HandoffHello | None:
    """The first message, None if it is not a hello. Raises StreamLost."""
    first: Request | None = await stream.read()
    if first is None or first.WhichOneof("message") != "hello":
        return None
    return first.hello
