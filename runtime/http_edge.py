"""The HTTP port for operators: /metrics (Prometheus), /health (alive), /ready (able to serve).

Answers GET and HEAD of these three paths on the program's own event loop, one request a connection,
so /health also says that the loop turns. Written by hand in place of a web framework: it parses one
request line and ignores the headers.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest

from runtime.bind_address import require_safe_bind

_READ_TIMEOUT_S = 5.0
_HEAD_LIMIT = 16 << 10
_MAX_CONNECTIONS = 64
_TEXT = "text/plain; charset=utf-8"

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Answer:
    status: HTTPStatus
    body: bytes
    content_type: str = _TEXT


class HttpEdge:
    """Make it with `HttpEdge.start`; `port` is the one it listens on."""

    def __init__(self, registry: CollectorRegistry, ready: Callable[[], bool]) -> None:
        self._registry = registry
        self._ready = ready
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self.port = 0

    @classmethod
    async def start(
        cls,
        host: str,
        port: int,
        *,
        registry: CollectorRegistry,
        ready: Callable[[], bool],
        insecure: bool = False,
    ) -> "HttpEdge":
        """Listens on host:port (0 = any free port). `ready` is asked at each GET /ready: 200 or 503.

        Raises UnsafeBindError for an address beyond loopback unless `insecure`, OSError when the
        port is taken.
        """
        require_safe_bind(host, encrypted=False, insecure=insecure)
        edge = cls(registry, ready)
        edge._server = await asyncio.start_server(edge._on_connection, host, port, limit=_HEAD_LIMIT)
        edge.port = edge._server.sockets[0].getsockname()[1]
        return edge

    async def close(self) -> None:
        """Stops listening and drops open connections."""
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _on_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("a connection is handled outside a task")
        self._tasks.add(task)
        try:
            if len(self._tasks) <= _MAX_CONNECTIONS:
                async with asyncio.timeout(_READ_TIMEOUT_S):
                    await self._serve(reader, writer)
        except (TimeoutError, ConnectionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            _log.debug("an HTTP client went away or sent no request")
        finally:
            self._tasks.discard(task)
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        method, _, rest = head.split(b"\r\n", 1)[0].decode("latin-1").partition(" ")
        path = rest.partition(" ")[0].partition("?")[0]
        answer = self._answer(method, path)
        writer.write(
            f"HTTP/1.1 {answer.status.value} {answer.status.phrase}\r\n"
            f"Content-Type: {answer.content_type}\r\n"
            f"Content-Length: {len(answer.body)}\r\n"
            "Connection: close\r\n\r\n".encode("latin-1")
        )
        if method != "HEAD":
            writer.write(answer.body)
        await writer.drain()

    def _answer(self, method: str, path: str) -> _Answer:
        if method not in ("GET", "HEAD"):
            return _Answer(HTTPStatus.METHOD_NOT_ALLOWED, b"only GET and HEAD\n")
        if path == "/health":
            return _Answer(HTTPStatus.OK, b"alive\n")
        if path == "/ready":
            if self._ready():
                return _Answer(HTTPStatus.OK, b"ready\n")
            return _Answer(HTTPStatus.SERVICE_UNAVAILABLE, b"not ready\n")
        if path == "/metrics":
            return _Answer(HTTPStatus.OK, generate_latest(self._registry), CONTENT_TYPE_PLAIN_0_0_4)
        return _Answer(HTTPStatus.NOT_FOUND, b"/metrics, /health or /ready\n")
