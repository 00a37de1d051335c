"""The worker's end of a gateway's long-lived stream: hello, messages both ways, loss.

A gateway beats four times a second. One that is silent for three seconds is gone, or stopped: a stopped
process keeps its connections. Silence is counted in this worker's own ticks, so that a pause of this process
is not taken for the gateway's.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import grpc

from diptych.runtime.discovery.records import Role
from diptych.runtime.rpc_streams.stream import Refused, StreamLost
from diptych.runtime.rpc_streams.stream import Stream as Link
from diptych.worker.v1 import work_pb2

SILENT_TICKS = 12
"""Heartbeats of the worker after which a silent gateway is taken for lost."""
_log = logging.getLogger(__name__)


class GatewayStream(Protocol):
    """The messages of a worker to one gateway."""

    def messages(self) -> AsyncIterator[Any]:
        """Yield the messages to write; ends when the stream is closed."""
        ...

    def heartbeat(self, beat: work_pb2.Heartbeat) -> None: ...

    @property
    def has_pending(self) -> bool:
        """True while outputs of requests that have ended are still being written."""
        ...


Stream = TypeVar("Stream", bound=GatewayStream)


@dataclass(slots=True)
class _Open:
    """A stream that has not ended."""

    writer: asyncio.Task[None]
    silent_ticks: int = 0


@dataclass(frozen=True, slots=True)
class DrainOrder:
    """A gateway's order to drain.

    ``grace_s``: seconds that running requests get; None leaves it to the worker's own setting. ``become``:
    the role in which its supervisor is to start it again.
    """

    grace_s: float | None = None
    become: Role | None = None


_ROLES: Mapping[int, Role] = {
    work_pb2.WORKER_ROLE_PREFILL: "prefill",
    work_pb2.WORKER_ROLE_DECODE: "decode",
}


def read_drain(drain: work_pb2.Drain) -> DrainOrder:
    """Return the order in a message."""
    grace_s = drain.grace.ToNanoseconds() / 1e9 if drain.HasField("grace") else None
    return DrainOrder(grace_s, _ROLES.get(drain.become))


@dataclass(frozen=True, slots=True)
class GatewayLinks(Generic[Stream]):
    """Every gateway's stream into this worker.

    `make_stream(gateway id)` makes a stream; `on_message(message, stream)` gets each message that follows the
    hello; `on_lost(stream)` is called once or more when it has ended, and must close it.
    """

    hello: Any
    """The worker's hello, in the response message of its service."""
    make_stream: Callable[[str], Stream]
    on_message: Callable[[Any, Stream], None]
    on_lost: Callable[[Stream], None]
    streams: dict[Stream, _Open] = field(default_factory=dict)
    """Open streams in the order in which they came; broadcasts keep that order."""

    async def serve(self, link: Link) -> None:
        """Serve one stream, from hello to end; `on_lost` follows however it ends.

        Raises Refused and StreamLost.
        """
        hello = await _first_message(link)
        gateway = self.make_stream(hello.gateway_id)
        writer = asyncio.create_task(self._write(link, gateway), name="gateway-link-writer")
        reader = asyncio.create_task(self._read(link, gateway), name="gateway-link-reader")
        self.streams[gateway] = _Open(writer)
        try:
            await asyncio.wait((writer,))
            if writer.cancelled():  # by `tick`: it would wait for room as long as the gateway stands still
                raise StreamLost(grpc.StatusCode.UNAVAILABLE, "the gateway is silent")
            writer.result()
        finally:
            reader.cancel()
            writer.cancel()
            self.streams.pop(gateway, None)
            self.on_lost(gateway)

    def tick(self) -> None:
        """End the streams of gateways that fell silent. Call it with every heartbeat."""
        for gateway, stream in list(self.streams.items()):
            stream.silent_ticks += 1
            if stream.silent_ticks >= SILENT_TICKS:
                _log.warning("a gateway is silent; its stream ends")
                stream.writer.cancel()
                del self.streams[gateway]
                self.on_lost(gateway)

    @property
    def has_pending(self) -> bool:
        """See `GatewayStream.has_pending`: of any of them."""
        return any(gateway.has_pending for gateway in self.streams)

    def heartbeat(self, beat: work_pb2.Heartbeat) -> None:
        """Send a heartbeat to every gateway."""
        for gateway in tuple(self.streams):
            gateway.heartbeat(beat)

    async def _write(self, link: Link, gateway: Stream) -> None:
        await link.write(self.hello)
        async for reply in gateway.messages():
            await link.write(reply)

    async def _read(self, link: Link, gateway: Stream) -> None:
        """Read until the stream ends. Its silence is counted until all is written, however reading ends."""
        try:
            # A stream that broke is an end like any other: the attempts on it are cancelled either way.
            with contextlib.suppress(StreamLost):
                while (message := await link.read()) is not None:
                    if gateway in self.streams:
                        self.streams[gateway].silent_ticks = 0
                    self.on_message(message, gateway)
        except Exception:
            # The content of this message is unknown, so that its sender could wait for ever: the stream ends,
            # and with it all that its gateway waits for.
            _log.exception("a gateway's message could not be handled; its stream ends")
        finally:
            self.on_lost(gateway)


async def _first_message(link: Link) -> work_pb2.GatewayHello:
    """Return the hello with which a stream begins. Raises Refused for any other message."""
    message = await link.read()
    if message is None or message.WhichOneof("message") != "hello":
        raise Refused(grpc.StatusCode.INVALID_ARGUMENT, "hello: must be the first message of the stream")
    hello: work_pb2.GatewayHello = message.hello
    return hello
