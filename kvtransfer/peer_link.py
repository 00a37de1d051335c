"""One stream from a prefill worker to a decode worker: connect, hello, then messages both ways."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Sequence
from typing import Any

import grpc

from diptych.worker.v1 import handoff_pb2, handoff_pb2_grpc, work_pb2
from kvtransfer.errors import HandoffRefused
from kvtransfer.fingerprint import Fingerprint, incompatible_field
from kvtransfer.host import host_id
from kvtransfer.messages import WriterId
from kvtransfer.wire import Request, Response
from runtime.outbox import Outbox
from runtime.rpc import make_channel

Call = grpc.aio.StreamStreamCall[Any, Any]
_CONNECT_S = 3.0
_INCOMPATIBLE = work_pb2.FailureReason.FAILURE_REASON_INCOMPATIBLE
_PEER_LOST = work_pb2.FailureReason.FAILURE_REASON_PEER_LOST


class PeerLink:
    """The I/O of one stream; what its messages mean is decided elsewhere."""

    def __init__(self, channel: grpc.aio.Channel, call: Call, welcome: handoff_pb2.HandoffWelcome) -> None:
        self.welcome = welcome
        self._channel, self._call = channel, call
        self._outbox: Outbox[Request] = Outbox()
        self._task: asyncio.Task[None] | None = None

    @classmethod
    async def connect(
        cls,
        address: str,
        me: WriterId,
        fingerprint: Fingerprint,
        transports: Sequence[str],
        device: str = "",
    ) -> PeerLink:
        """Connect and say hello; `device` is the UUID of the GPU with our blocks. Raises HandoffRefused."""
        hello = handoff_pb2.HandoffHello(
            worker_id=me.worker_id,
            incarnation=me.incarnation,
            pid=os.getpid(),
            fingerprint=fingerprint.to_proto(),
            transports=transports,
            host_id=host_id(),
            device=device,
        )
        channel = make_channel(address)
        call = handoff_pb2_grpc.HandoffServiceStub(channel).Link()
        try:
            welcome = await _exchange_hello(call, hello)
            field = incompatible_field(fingerprint, Fingerprint.from_proto(welcome.fingerprint))
            if field is not None:
                raise HandoffRefused(_INCOMPATIBLE, f"the decode worker differs in {field}")
        except BaseException:
            call.cancel()
            await channel.close()
            raise
        return cls(channel, call, welcome)

    def start(self, handle: Callable[[Response], None], ended: Callable[[], None]) -> None:
        """Pass every message to `handle` until the stream ends, then call `ended` once."""
        self._task = asyncio.create_task(self._run(handle, ended))

    def put(self, request: Request) -> None:
        """Send it after what was put before; dropped when the stream is gone."""
        self._outbox.put(request)

    def close(self) -> None:
        """End the stream from our side; `ended` follows."""
        self._call.cancel()

    async def wait_closed(self) -> None:
        """Until the stream has ended and `ended` was called."""
        self._call.cancel()
        if self._task is not None:
            await asyncio.wait([self._task])
        else:
            await self._channel.close()

    async def _run(self, handle: Callable[[Response], None], ended: Callable[[], None]) -> None:
        writing = asyncio.create_task(self._write())
        try:
            # However it ends, the link is lost, and that is all that matters here.
            with contextlib.suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
                while isinstance(response := await self._call.read(), Response):
                    handle(response)
        finally:
            self._outbox.close()
            self._call.cancel()
            writing.cancel()
            ended()
            await asyncio.gather(writing, return_exceptions=True)
            await self._channel.close()

    async def _write(self) -> None:
        # A stream that cannot be written is broken: the reader sees that too and ends the link.
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            while requests := await self._outbox.take():
                for request in requests:
                    await self._call.write(request)


async def _exchange_hello(call: Call, hello: handoff_pb2.HandoffHello) -> handoff_pb2.HandoffWelcome:
    try:
        async with asyncio.timeout(_CONNECT_S):
            await call.write(Request(hello=hello))
            first = await call.read()
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
            text = f"the decode worker differs in {error.details()}"
            raise HandoffRefused(_INCOMPATIBLE, text) from error
        raise HandoffRefused(
            _PEER_LOST, f"the decode worker is not reachable ({error.code().name})"
        ) from error
    except asyncio.InvalidStateError as error:
        raise HandoffRefused(_PEER_LOST, "the decode worker ended the link at once") from error
    except TimeoutError as error:
        raise HandoffRefused(_PEER_LOST, "the decode worker does not answer") from error
    if not isinstance(first, Response) or first.WhichOneof("message") != "welcome":
        raise HandoffRefused(_PEER_LOST, "the decode worker did not say welcome")
    return first.welcome
