"""The worker's end of a gateway's long-lived stream: hello, messages both ways, loss.

A gateway beats four times a second. One that says nothing for three seconds is gone, or stopped: a stopped
process keeps its connections. Silence is counted in our own ticks, so that a pause of this process is not
taken for the gateway's.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import grpc

from diptych.runtime.rpc_streams.stream import Refused, StreamLost
from diptych.runtime.rpc_streams.stream import Stream as Link
from diptych.worker.v1 import work_pb2

SILENT_TICKS = 12
"""Of the worker's heartbeat."""
_log = logging.getLogger(__name__)


class GatewayStream(Protocol):
    """What a worker has to say to one gateway."""

    def messages(self) -> AsyncIterator[Any]:
        """What to write; ends when the stream is closed."""
        ...

    def heartbeat(self, beat: work_pb2.Heartbeat) -> None: ...

    @property
    def unsaid(self) -> bool:
        """Whether there is more to write than goes out at once, of requests that are over."""
        ...


Stream = TypeVar("Stream", bound=GatewayStream)


@dataclass(slots=True)
class _Open:
    """A stream that has not ended."""

    writer: asyncio.Task[None]
    silent_ticks: int = 0


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
    streams: dict[Stream, _Open] = field(default_factory=dict)
    """Those that are open, in the order in which they came: what is said to all is said in that order."""

    async def serve(self, link: Link) -> None:
        """One stream, from hello to end; `lost` follows however it ends. Raises Refused and StreamLost."""
        hello = await _first_message(link)
        gateway = self.opened(hello.gateway_id)
        writer = asyncio.create_task(self._write(link, gateway), name="gateway-link-writer")
        reader = asyncio.create_task(self._read(link, gateway), name="gateway-link-reader")
        self.streams[gateway] = _Open(writer)
        try:
            await asyncio.wait((writer,))
            if writer.cancelled():  # by `tick`: it would wait for room as long as the gateway stands still
                raise StreamLost(grpc.StatusCode.UNAVAILABLE, "the gateway says nothing")
            writer.result()
        finally:
            reader.cancel()
            writer.cancel()
            self.streams.pop(gateway, None)
            self.lost(gateway)

    def tick(self) -> None:
        """Call it with every heartbeat: ends the streams of gateways that fell silent."""
        for gateway, stream in list(self.streams.items()):
            stream.silent_ticks += 1
            if stream.silent_ticks >= SILENT_TICKS:
                _log.warning("a gateway says nothing any more; its stream ends")
                stream.writer.cancel()
                del self.streams[gateway]
                self.lost(gateway)

    @property
    def unsaid(self) -> bool:
        """See `GatewayStream.unsaid`: of any of them."""
        return any(gateway.unsaid for gateway in self.streams)

    def heartbeat(self, beat: work_pb2.Heartbeat) -> None:
        """Say it to every gateway."""
        for gateway in tuple(self.streams):
            gateway.heartbeat(beat)

    async def _write(self, link: Link, gateway: Stream) -> None:
        await link.write(self.greeting)
        async for reply in gateway.messages():
            await link.write(reply)

    async def _read(self, link: Link, gateway: Stream) -> None:
        """Whatever ends it, the stream stays among those whose silence is counted until all is written."""
        try:
            # A stream that broke is an end like any other: the attempts on it are cancelled either way.
            with contextlib.suppress(StreamLost):
                while (message := await link.read()) is not None:
                    if gateway in self.streams:
                        self.streams[gateway].silent_ticks = 0
                    self.heard(message, gateway)
        except Exception:
            # What this message wanted is unknown, so nobody may wait for it: the stream ends, and with it
            # all that its gateway waits for.
            _log.exception("a gateway's message could not be taken; its stream ends")
        finally:
            self.lost(gateway)


async def _first_message(link: Link) -> work_pb2.GatewayHello:
    """The hello with which a stream begins; anything else is refused."""
    message = await link.read()
    if message is None or message.WhichOneof("message") != "hello":
        raise Refused(grpc.StatusCode.INVALID_ARGUMENT, "hello: must be the first message of the stream")
    hello: work_pb2.GatewayHello = message.hello
    return hello
