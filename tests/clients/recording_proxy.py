"""HTTP proxy that hands everything on and keeps each exchange, for the report of a path that failed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import aiohttp
from aiohttp import web

KEPT_BYTES = 4000
HOP_HEADERS = {"connection", "keep-alive", "transfer-encoding", "host", "content-length", "accept-encoding"}


@dataclass
class Exchange:
    """A request and its response, cut to KEPT_BYTES each; a `status` of 0 means that no response came."""

    request: str
    body: bytes
    status: int = 0
    response: bytes = b""

    @property
    def error_message(self) -> str:
        """The text of the server's error, or what came instead of one."""
        text = self.response.decode(errors="replace")
        try:
            return str(json.loads(text)["error"]["message"])
        except (ValueError, KeyError, TypeError):
            return text

    def __str__(self) -> str:
        body, response = (text.decode(errors="replace") for text in (self.body, self.response))
        return f"{self.request}\n{body}\n-> {self.status}\n{response}"


@dataclass
class RecordingProxy:
    """A running proxy for one system."""

    target: str
    port: int = 0
    exchanges: list[Exchange] = field(default_factory=list)

    @property
    def root(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def take_exchanges(self) -> list[Exchange]:
        """Return the exchanges since the last call."""
        taken, self.exchanges = self.exchanges, []
        return taken

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answer as the target does, piece by piece; a client that hangs up closes the target's stream."""
        body = await request.read()
        exchange = Exchange(f"{request.method} {request.path_qs}", body[:KEPT_BYTES])
        if request.path != "/metrics":
            self.exchanges.append(exchange)
        headers = {name: value for name, value in request.headers.items() if name.lower() not in HOP_HEADERS}
        timeout = aiohttp.ClientTimeout(total=None)
        async with (
            aiohttp.ClientSession(timeout=timeout, auto_decompress=False) as session,
            session.request(
                request.method, self.target + request.path_qs, data=body or None, headers=headers
            ) as answer,
        ):
            exchange.status = answer.status
            kept = {name: value for name, value in answer.headers.items() if name.lower() not in HOP_HEADERS}
            response = web.StreamResponse(status=answer.status, headers=kept)
            await response.prepare(request)
            async for piece in answer.content.iter_any():
                exchange.response = (exchange.response + piece)[:KEPT_BYTES]
                await response.write(piece)
            await response.write_eof()
            return response


@contextlib.contextmanager
def recording(target: str) -> Iterator[RecordingProxy]:
    """Run a proxy for the root URL `target` in a thread of its own."""
    proxy = RecordingProxy(target)
    loop, started, stopping = asyncio.new_event_loop(), threading.Event(), asyncio.Event()

    async def serve() -> None:
        app = web.Application(client_max_size=64 << 20)
        app.router.add_route("*", "/{path:.*}", proxy.handle)
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        proxy.port = runner.addresses[0][1]
        started.set()
        await stopping.wait()
        await runner.cleanup()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),), daemon=True)
    thread.start()
    started.wait(30)
    try:
        yield proxy
    finally:
        loop.call_soon_threadsafe(stopping.set)
        thread.join(30)
        loop.close()
