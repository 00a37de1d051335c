"""Simulated gRPC: channels, servers and long streams between hosts, with the promises of the real thing.

One stream keeps its messages in order and delivers each once or breaks; nothing is promised between streams,
not even between an old one and its successor. Messages are serialised and parsed, so that no two hosts share
an object. A host that dies breaks its streams; one that is stopped leaves them open. Each end notices a break
after a delay of its own.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextvars import copy_context
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import grpc

from tests.simulation.virtual_loop import Host, VirtualLoop, current_host

USUAL_DELAY_S = (0.0001, 0.002)
SLOW_DELAY_S = (0.005, 0.06)
SLOW_SHARE = 0.04


@dataclass
class LinkConditions:
    """The current faults of the network between two hosts."""

    extra_delay_s: float = 0.0
    held_until: float = 0.0  # a partition: TCP delivers when it is over
    repeat: int = 0  # number of step batches to deliver twice


class Pipe:
    """One direction of a stream: in order, each delivery a callback of the receiving host.

    The machine of `host` or of `sender` may fall silent, if these are two: what is sent then comes later.
    """

    def __init__(
        self,
        network: Network,
        name: str,
        ends: tuple[str, str],
        host: Host | None,
        sender: Host | None = None,
    ) -> None:
        self._network = network
        self._random = random.Random(f"{network.seed}/{name}")
        self._ends = ends
        self._context = copy_context()
        self._context.run(current_host.set, host)
        self._machines = () if host is None or sender is None else (host, sender)
        self._last = 0.0

    def send(self, deliver: Callable[..., None], *args: Any) -> None:
        """Call `deliver` on the receiving host, after all that was sent before."""
        network = self._network
        draw = self._random.random()
        low, high = SLOW_DELAY_S if draw < SLOW_SHARE else USUAL_DELAY_S
        delay = low + (high - low) * self._random.random()
        conditions = network.conditions.get(self._ends)
        when = network.loop.now + delay
        if conditions is not None:
            when = max(when + conditions.extra_delay_s, conditions.held_until + delay)
        for one in self._machines:
            if one.silent_until:
                when = max(when, one.silent_until + delay)
        self._last = max(self._last, when)
        network.loop.at(self._last, deliver, *args, context=self._context).network = True


class Inbox:
    """The messages that have arrived and were not read."""

    def __init__(self) -> None:
        self._items: deque[Any] = deque()
        self._reader: asyncio.Future[None] | None = None
        self.end: Callable[[], Any] | None = None  # result of reading once the items are read

    def put(self, item: Any) -> None:
        self._items.append(item)
        self._wake()

    def close(self, end: Callable[[], Any], *, at_once: bool = False) -> None:
        """End the inbox; `at_once` drops the messages that were not read."""
        if at_once:
            self._items.clear()
        if self.end is None or at_once:
            self.end = end
        self._wake()

    async def read(self) -> Any:
        while not self._items:
            if self.end is not None:
                return self.end()
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        return self._items.popleft()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


def _failure(code: grpc.StatusCode, details: str) -> Callable[[], Any]:
    def fail() -> Any:
        raise grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details)

    return fail


def _cancelled() -> Any:
    raise asyncio.CancelledError


class ClientCall:
    """A `grpc.aio.StreamStreamCall`, as far as the product uses one."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    async def write(self, message: Any) -> None:
        stream = self._stream
        if stream.client_over:
            raise asyncio.InvalidStateError("RPC already finished.")
        stream.up.send(stream.at_server, stream.method.request_serializer(message))

    async def read(self) -> Any:
        return await self._stream.to_client.read()

    def cancel(self) -> bool:
        return self._stream.cancel()


class ServerContext:
    """A `grpc.aio.ServicerContext`, as far as the product uses one."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    async def read(self) -> Any:
        return await self._stream.to_server.read()

    async def write(self, message: Any) -> None:
        stream = self._stream
        if stream.server_over:
            raise grpc.aio.UsageError("the RPC is over")
        stream.network.sent(stream, message)
        stream.down.send(stream.at_client, stream.method.handler.response_serializer(message))

    async def abort(self, code: grpc.StatusCode, details: str = "", *_: Any) -> None:
        self._stream.end(_failure(code, details))
        raise grpc.aio.AbortError

    async def requests(self) -> AsyncIterator[Any]:
        while (message := await self.read()) is not grpc.aio.EOF:
            yield message


@dataclass
class Method:
    """One method, from both generated ends; the server's is found when the stream arrives there."""

    path: str
    request_serializer: Callable[[Any], bytes]
    response_deserializer: Callable[[bytes], Any]
    handler: Any = None


class Stream:
    """One call, alive at two hosts that need not agree on whether it is."""

    def __init__(self, network: Network, client: Host | None, address: str, method: Method) -> None:
        self.network, self.client, self.address, self.method = network, client, address, method
        server = network.servers.get(address)
        self.server = server.host if server is not None else None
        self.ends = (_name(client), server.host.name if server is not None else address)
        network.streams += 1
        name = f"{self.ends[0]}>{self.ends[1]}/{method.path}/{network.opened(self.ends)}"
        self.up = Pipe(network, name + "/up", self.ends, self.server, client)
        self.down = Pipe(network, name + "/down", self.ends, client, self.server)
        self.to_client, self.to_server = Inbox(), Inbox()
        self.client_over = self.server_over = False
        self.task: asyncio.Task[None] | None = None
        if server is None:
            self.down.send(self.lost)
            return
        server.host.on_death.append(lambda: self.down.send(self.lost))
        if client is not None:
            client.on_death.append(lambda: self.up.send(self.gone))
        network.live[self] = None
        self.up.send(self.opened)

    # -- at the server

    def opened(self) -> None:
        server = self.network.servers.get(self.address)
        handler = None
        if server is not None and server.host is self.server:
            handler = server.handler(self.method.path)
        if handler is None:
            self.down.send(self.lost)
            return
        self.method.handler = handler
        context = ServerContext(self)
        self.task = self.network.loop.create_task(
            self._serve(self.method.handler.stream_stream(context.requests(), context))
        )

    async def _serve(self, handler: Any) -> None:
        try:
            await handler
        except asyncio.CancelledError:
            self.end(_failure(grpc.StatusCode.CANCELLED, "cancelled"))
        except grpc.aio.AbortError:
            pass
        except Exception as error:
            self.network.failed({"message": "a handler raised", "exception": error})
            self.end(_failure(grpc.StatusCode.UNKNOWN, "unexpected"))
        else:
            self.end(lambda: grpc.aio.EOF)

    def end(self, end: Callable[[], Any]) -> None:
        """End the handler's side: its status follows its messages."""
        if not self.server_over:
            self.server_over = True
            self.to_server.close(lambda: grpc.aio.EOF, at_once=True)
            self.down.send(self._ended, end)

    def at_server(self, data: bytes) -> None:
        if not self.server_over and self.method.handler is not None:
            message = self.method.handler.request_deserializer(data)
            self.network.arrived(self, message)
            self.to_server.put(message)

    def gone(self) -> None:
        """End the stream for the handler: the client cancelled, died, or cannot be reached."""
        if self.server_over:
            return
        self.server_over = True
        self.to_server.close(lambda: grpc.aio.EOF)
        if self.task is not None:
            self.task.cancel()
        self.network.live.pop(self, None)

    # -- at the client

    def at_client(self, data: bytes) -> None:
        if not self.client_over:
            message = self.method.response_deserializer(data)
            self.network.arrived(self, message)
            self.to_client.put(message)

    def lost(self) -> None:
        self._ended(_failure(grpc.StatusCode.UNAVAILABLE, "the connection broke"))

    def _ended(self, end: Callable[[], Any]) -> None:
        if not self.client_over:
            self.client_over = True
            self.to_client.close(end)
            self.network.live.pop(self, None)

    def cancel(self) -> bool:
        if self.client_over:
            return False
        self.client_over = True
        self.to_client.close(_cancelled, at_once=True)
        self.up.send(self.gone)
        return True

    def reset(self) -> None:
        """Break the connection; each end notices it in its own time."""
        self.down.send(self.lost)
        self.up.send(self.gone)


class Channel:
    """A `grpc.aio.Channel` to one address."""

    def __init__(self, network: Network, address: str) -> None:
        self._network = network
        self._address = address
        self._calls: list[ClientCall] = []

    def stream_stream(
        self, path: str, request_serializer: Any = None, response_deserializer: Any = None, **_: Any
    ) -> Callable[[], ClientCall]:
        def start() -> ClientCall:
            method = Method(path, request_serializer, response_deserializer)
            call = ClientCall(Stream(self._network, current_host.get(), self._address, method))
            self._calls.append(call)
            return call

        return start

    async def close(self, grace: float | None = None) -> None:
        for call in self._calls:
            call.cancel()


@dataclass
class Server:
    """A `grpc.aio.Server` of one host."""

    network: Network
    host: Host
    generic: list[Any] = field(default_factory=list)
    address: str = ""

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        self.generic += handlers

    def handler(self, path: str) -> Any:
        """Return the handler of a method; None where there is none."""
        wanted = SimpleNamespace(method=path, invocation_metadata=())
        return next((found for one in self.generic if (found := one.service(wanted)) is not None), None)

    async def start(self) -> None:
        self.network.servers[self.address] = self

    async def stop(self, grace: float | None) -> None:
        if self.network.servers.get(self.address) is self:
            del self.network.servers[self.address]
        for stream in [s for s in self.network.live if s.server is self.host]:
            if stream.task is not None and not stream.task.done():
                stream.task.cancel()

    async def wait_for_termination(self) -> None:
        await asyncio.Event().wait()


class Network:
    """The traffic of all hosts."""

    def __init__(self, loop: VirtualLoop, seed: object, note: Callable[..., None]) -> None:
        self.loop = loop
        self.seed = seed
        self.note = note
        self.failed: Callable[[dict[str, Any]], None] = lambda context: None
        self.servers: dict[str, Server] = {}
        self.live: dict[Stream, None] = {}
        self.conditions: dict[tuple[str, str], LinkConditions] = {}
        self.streams = 0
        self.messages = 0
        self._opened: dict[tuple[str, str], int] = {}

    def opened(self, ends: tuple[str, str]) -> int:
        self._opened[ends] = self._opened.get(ends, 0) + 1
        return self._opened[ends]

    def channel(self, address: str, *_: Any, **__: Any) -> Channel:
        return Channel(self, address)

    def sent(self, stream: Stream, message: Any) -> None:
        """Repeat a step batch where the link does so: tokens carry their index and may come twice."""
        conditions = self.conditions.get(stream.ends)
        if conditions is None or not conditions.repeat or message.WhichOneof("message") != "step":
            return
        conditions.repeat -= 1
        twin = type(message)()
        twin.CopyFrom(message)
        del twin.step.ended[:]
        stream.down.send(stream.at_client, twin.SerializeToString())

    def arrived(self, stream: Stream, message: Any) -> None:
        self.messages += 1
        kind = message.WhichOneof("message")
        if kind != "heartbeat":
            self.note(stream.ends, kind, message.ByteSize())

    def between(self, one: str, other: str) -> list[Stream]:
        return [stream for stream in self.live if set(stream.ends) == {one, other}]


def _name(host: Host | None) -> str:
    return "outside" if host is None else host.name
