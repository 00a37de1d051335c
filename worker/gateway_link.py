"""The worker's end of a gateway's long-lived stream: hello, messages both ways, loss.

The handler writes by itself instead of yielding replies to gRPC: a generator that gRPC drops while it writes
one ends when the garbage collector finds it, and until then nobody would cancel what came over the stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import grpc

from diptych.worker.v1 import work_pb2

_log = logging.getLogger(__name__)
Context = grpc.aio.ServicerContext[Any, Any]


class GatewayStream(Protocol):
    """What a worker has to say to one gateway."""

    def messages(self) -> AsyncIterator[Any]:
        """What to write; ends when the stream is closed."""
        ...

    def heartbeat(self, beat: work_pb2.Heartbeat) -> None: ...


Stream = TypeVar("Stream", bound=GatewayStream)


def drain_grace_s(drain: work_pb2.Drain) -> float | None:
    """How long what runs may go on, in seconds; None leaves it to the worker's own setting."""
    return drain.grace.ToNanoseconds() / 1e9 if drain.HasField("grace") else None


@dataclass(frozen=True, slots=True)
class GatewayLinks(Generic[Stream]):
    """Every gateway's stream into this worker, and what to do with them.

    `opened(gateway id)` makes a stream; `heard(message, stream)` gets each message that follows the hello;
    `lost(stream)` is called once or more when it is over, and must close it.
    """

    greeting: Any
    """The worker's hello, in the response message of its service."""
    opened: Callable[[str], Stream]
    heard: Callable[[Any, Stream], None]
    lost: Callable[[Stream], None]
    streams: dict[Stream, None] = field(default_factory=dict)
    """Those that are open, in the order in which they came: what is said to all is said in that order."""

    async def serve(self, requests: AsyncIterator[Any], context: Context) -> None:
        """One stream, from hello to end; `lost` follows however it ends."""
        hello = await _first_message(requests, context)
        gateway = self.opened(hello.gateway_id)
        self.streams[gateway] = None
        reader = asyncio.create_task(self._read(requests, gateway), name="gateway-link-reader")
        try:
            await context.write(self.greeting)
            async for reply in gateway.messages():
                await context.write(reply)
        finally:
            reader.cancel()
            self._over(gateway)

    async def _read(self, requests: AsyncIterator[Any], gateway: Stream) -> None:
        try:
            # A reset stream is an end like any other: the attempts on it are cancelled either way.
            with contextlib.suppress(grpc.aio.UsageError, grpc.RpcError):
                async for message in requests:
                    self.heard(message, gateway)
        except Exception:
            # What this message wanted is unknown, so nobody may wait for it: the stream ends, and with it
            # all that its gateway waits for.
            _log.exception("a gateway's message could not be taken; its stream ends")
        finally:
            self._over(gateway)

    def _over(self, gateway: Stream) -> None:
        self.streams.pop(gateway, None)
        self.lost(gateway)


async def _first_message(requests: AsyncIterator[Any], context: Context) -> work_pb2.GatewayHello:
    """The hello with which a stream begins; anything else is refused."""
    async for message in requests:
        if message.WhichOneof("message") == "hello":
            hello: work_pb2.GatewayHello = message.hello
            return hello
        break
    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "hello: must be the first message of the stream")
    raise RuntimeError("abort returned")
