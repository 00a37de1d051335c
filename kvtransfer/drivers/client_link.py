"""The connecting end of a stream between two workers: hello and welcome, then messages both ways."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import grpc

from diptych.runtime.internal_tls import InternalTls
from diptych.runtime.rpc_streams.connect import open_link
from diptych.runtime.rpc_streams.method import LinkMethod
from diptych.runtime.rpc_streams.stream import ClientStream, Stream, StreamLost
from diptych.runtime.send_queue import SendQueue
from diptych.worker.v1 import work_pb2
from kvtransfer.protocol.errors import HandoffDenied

_CONNECT_S = 3.0
INCOMPATIBLE = work_pb2.FailureReason.FAILURE_REASON_INCOMPATIBLE
PEER_LOST = work_pb2.FailureReason.FAILURE_REASON_PEER_LOST


class ClientLink:
    """An open stream to a worker that has sent its welcome; the meaning of messages is decided elsewhere."""

    def __init__(self, stream: ClientStream) -> None:
        self._stream = stream
        self._send_queue: SendQueue[Any] = SendQueue()
        # From the hello on: heartbeats to the peer do not wait until this side reads.
        self._writing = asyncio.create_task(self._write())
        self._task: asyncio.Task[None] | None = None

    def start(self, handle: Callable[[Any], None], ended: Callable[[], None]) -> None:
        """Pass every message to `handle` until the stream ends, then call `ended` once."""
        self._task = asyncio.create_task(self._run(handle, ended))

    def put(self, request: Any) -> None:
        """Send a message after those that were put before; it is dropped once the stream is gone."""
        self._send_queue.put(request)

    def close(self) -> None:
        """End the stream from this side; `ended` follows."""
        self._stream.cancel()

    async def wait_closed(self) -> None:
        """Wait until the stream has ended, and `ended` was called if the link was started."""
        self._stream.cancel()
        if self._task is not None:
            await asyncio.wait([self._task])
        else:
            await self._end()

    async def _run(self, handle: Callable[[Any], None], ended: Callable[[], None]) -> None:
        try:
            # The link is lost however the stream ends.
            with contextlib.suppress(StreamLost, asyncio.CancelledError):
                while (response := await self._stream.read()) is not None:
                    handle(response)
        finally:
            self._send_queue.close()
            self._stream.cancel()
            ended()
            await self._end()

    async def _end(self) -> None:
        self._writing.cancel()
        await asyncio.gather(self._writing, return_exceptions=True)
        await self._stream.close()

    async def _write(self) -> None:
        # A stream that cannot be written is broken: the reader sees that too and ends the link.
        with contextlib.suppress(StreamLost):
            while requests := await self._send_queue.take():
                for request in requests:
                    await self._stream.write(request)


async def open_stream(address: str, method: LinkMethod, tls: InternalTls | None, who: str) -> ClientStream:
    """Return a stream to `who`, as messages name the worker at `address`. Raises HandoffDenied."""
    try:
        return await open_link(address, method, tls)
    except StreamLost as error:
        raise _denied(error, who) from error


async def exchange_hello(stream: Stream, hello: Any, who: str) -> Any:
    """Send the first message and return the welcome. Raises HandoffDenied."""
    try:
        async with asyncio.timeout(_CONNECT_S):
            await stream.write(hello)
            first = await stream.read()
    except StreamLost as error:
        raise _denied(error, who) from error
    except TimeoutError as error:
        raise HandoffDenied(PEER_LOST, f"the {who} does not answer") from error
    if first is None or first.WhichOneof("message") != "welcome":
        raise HandoffDenied(PEER_LOST, f"the {who} did not send welcome")
    return first.welcome


def _denied(error: StreamLost, who: str) -> HandoffDenied:
    if error.code is grpc.StatusCode.FAILED_PRECONDITION:
        return HandoffDenied(INCOMPATIBLE, f"the {who} differs in {error.details}")
    if error.code in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
        return HandoffDenied(PEER_LOST, f"no link to the {who}: {error.details}")
    return HandoffDenied(PEER_LOST, f"the {who} is not reachable ({error.code.name})")
