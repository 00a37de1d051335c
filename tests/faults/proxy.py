"""A TCP proxy that can be slow, silent, or gone: between a process and what it talks to.

    with running_proxy(6379) as proxy:        # listens on proxy.port, forwards to 127.0.0.1:6379
        proxy.delay_s = 0.2                   # every byte arrives so much later, each way
        proxy.freeze(); proxy.thaw()          # connections stay and nothing comes through
        proxy.cut()                           # open connections are reset; new ones are accepted
        proxy.refuse(); proxy.accept()        # new ones are reset at once
        proxy.target = 6380                   # where new connections lead: a failover

It runs on a thread with an event loop of its own, so that a test may block.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Iterator

_CHUNK = 1 << 16
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER of no time: a close sends RST, as for a dead process


class Proxy:
    """See the module. ``forwarded`` counts bytes, both ways."""

    def __init__(self, target: int) -> None:
        self.target = target
        self.delay_s = 0.0
        self.port = 0
        self.forwarded = 0
        self._refusing = False
        self._open: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._flowing = asyncio.Event()
        self._flowing.set()

    def freeze(self) -> None:
        self._do(self._flowing.clear)

    def thaw(self) -> None:
        self._do(self._flowing.set)

    def cut(self) -> None:
        self._do(self._reset_all)

    def refuse(self) -> None:
        self._refusing = True
        self.cut()

    def accept(self) -> None:
        self._refusing = False

    def _do(self, what: Callable[[], None]) -> None:
        done = threading.Event()

        def run() -> None:
            what()
            done.set()

        self._loop.call_soon_threadsafe(run)
        assert done.wait(5), "the proxy's loop hangs"

    def _reset_all(self) -> None:
        for writer in list(self._open):
            _reset(writer)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._refusing:
            _reset(writer)
            return
        try:
            upstream_reader, upstream = await asyncio.open_connection("127.0.0.1", self.target)
        except OSError:
            _reset(writer)
            return
        self._open |= {writer, upstream}
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pump(reader, upstream))
                group.create_task(self._pump(upstream_reader, writer))
        except* OSError:
            pass  # one side is gone, and so the other one is told
        finally:
            for one in (writer, upstream):
                self._open.discard(one)
                _reset(one)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Each chunk leaves `delay_s` after it came, however many are under way."""
        pending: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

        async def deliver() -> None:
            while True:
                due, data = await pending.get()
                await asyncio.sleep(max(due - self._loop.time(), 0.0))
                await self._flowing.wait()
                if not data:
                    raise ConnectionResetError
                self.forwarded += len(data)
                writer.write(data)
                await writer.drain()

        delivering = asyncio.ensure_future(deliver())
        try:
            while True:
                data = await reader.read(_CHUNK)
                pending.put_nowait((self._loop.time() + self.delay_s, data))
                if not data:
                    await delivering
        finally:
            delivering.cancel()


def _reset(writer: asyncio.StreamWriter) -> None:
    tcp = writer.get_extra_info("socket")
    if tcp is not None:
        with contextlib.suppress(OSError):
            tcp.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    writer.transport.abort()


@contextlib.contextmanager
def running_proxy(target: int) -> Iterator[Proxy]:
    """A proxy in front of 127.0.0.1:`target`, on a free port."""
    proxy, started = Proxy(target), threading.Event()
    loop = proxy._loop

    async def start() -> asyncio.Server:
        server = await asyncio.start_server(proxy._serve, "127.0.0.1", 0)
        proxy.port = server.sockets[0].getsockname()[1]
        started.set()
        return server

    def run() -> None:
        asyncio.set_event_loop(loop)
        server = loop.run_until_complete(start())
        loop.run_forever()
        server.close()
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        loop.close()

    thread = threading.Thread(target=run, name="proxy")
    thread.start()
    try:
        assert started.wait(5)
        yield proxy
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
