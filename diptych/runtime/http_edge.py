"""The HTTP port of every program: /metrics (Prometheus), /health (alive), /ready (able to serve), /version.

It runs on the program's own event loop, so /health also says that the loop turns. All other paths go to the
program's API, if it has one: the gateway's serves OpenAI's API.

What a client can do to the port is bounded here: the number of connections, the size of heads and bodies, and
the time that a connection may sit without a whole request. A client that goes away cancels its handler. When
clients have all connections, some short-lived ones are left in which the paths named above are answered still
and all other requests get a 503 with Retry-After.
"""

import asyncio
import json
import logging
import math
import socket
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any, NamedTuple

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest

from diptych import __version__
from diptych.runtime.bind_address import CannotListen, join_host_port, require_safe_bind
from diptych.runtime.descriptors import ConnectionLimits, connection_limits
from diptych.runtime.tls import BadTlsFiles, TlsFiles

IDLE_S = 30.0
"""Seconds for the head of a request, and between two requests on one connection."""
STALL_S = 60.0
"""A client that takes nothing of what is there for it for so long is gone, and the kernel (Linux) says so."""
_SPARE_S = 5.0  # that one of them may last
_RETRY_AFTER_S = 1
_MAX_BODY_BYTES = 64 << 10
_BACKLOG = 512
_GRACE_S = 0.5
_NEXT_REQUEST_S = 0.5  # in which a client that has its answer sends its next request
_TEXT = "text/plain"

_log = logging.getLogger(__name__)

HttpApi = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


class HttpEdge:
    """Make it with `HttpEdge.start`; `port` is the one it listens on."""

    def __init__(
        self,
        registry: CollectorRegistry,
        ready: Callable[[], bool],
        api: HttpApi | None,
        *,
        why_not_ready: Callable[[], str],
        alive: Callable[[], bool],
        gives_work: Callable[[str], bool] | None = None,
        lacks: Callable[[str], str] | None = None,
        certificates: bool = False,
        config_digest: str = "",
        computes: str = "",
    ) -> None:
        self._registry = registry
        self._ready = ready
        self._why_not_ready = why_not_ready
        self._alive = alive
        self._gives_work = gives_work
        self._lacks = lacks
        self._api = api
        self._certificates = certificates
        self._config_digest = config_digest
        self._computes = computes
        self._server: _Server | None = None
        self._runner: web.ServerRunner | None = None
        self._leaving = False
        self._handling = 0  # requests that the API has, also those whose bodies still come
        self._answered_at = -math.inf  # the API's last answer, on the event loop's clock
        self.port = 0

    @classmethod
    async def start(
        cls,
        host: str,
        port: int,
        *,
        registry: CollectorRegistry,
        ready: Callable[[], bool],
        why_not_ready: Callable[[], str] = lambda: "",
        alive: Callable[[], bool] = lambda: True,
        gives_work: Callable[[str], bool] | None = None,
        lacks: Callable[[str], str] | None = None,
        tls: TlsFiles | None = None,
        insecure: bool = False,
        api: HttpApi | None = None,
        max_body_bytes: int = _MAX_BODY_BYTES,
        share_port: bool = False,
        config_digest: str = "",
        computes: str = "",
    ) -> "HttpEdge":
        """Listen on host:port (0 = any free port).

        `ready` is asked at each GET /ready: 200, or 503 with what `why_not_ready` says in a line, and `alive`
        at each GET /health: a process that is not is ended by its supervisor.

        `gives_work` is asked at GET /ready?worker=NAME: whether this gateway gives work to that worker, and
        `lacks` at GET /ready?model=NAME: why that model has no workers, empty where it has some.
        With `share_port` another process may listen there too, if it shares as well. Where `tls` wants
        certificates of clients, the API does, and the paths of probes do not: they have none. GET /version
        says what a worker `computes`.
        Raises UnsafeBindError for an address beyond loopback without `tls` unless `insecure`, CannotListen
        when the port is taken, BadTlsFiles.
        """
        require_safe_bind(host, encrypted=tls is not None, insecure=insecure)
        certificates = tls is not None and tls.client_ca is not None
        edge = cls(
            registry,
            ready,
            api,
            why_not_ready=why_not_ready,
            alive=alive,
            gives_work=gives_work,
            lacks=lacks,
            certificates=certificates,
            config_digest=config_digest,
            computes=computes,
        )
        edge._server = _Server(edge._respond, edge._ends_connection, max_body_bytes, connection_limits())
        edge._runner = web.ServerRunner(edge._server, shutdown_timeout=_GRACE_S)
        await edge._runner.setup()
        try:
            site = web.TCPSite(
                edge._runner,
                host,
                port,
                ssl_context=None if tls is None else tls.server_context(),
                backlog=_BACKLOG,
                reuse_port=share_port or None,
            )
            await site.start()
        except BadTlsFiles:
            await edge._runner.cleanup()
            raise
        except OSError as error:
            await edge._runner.cleanup()
            reason = (error.strerror or str(error)).rpartition(": ")[2]  # asyncio names the address, too
            raise CannotListen(f"cannot listen on {join_host_port(host, port)}: {reason}") from error
        edge.port = edge._runner.addresses[0][1]
        return edge

    def next_request_s(self) -> float:
        """Return the seconds for which a request may still come whole once it leaves: from a client that had
        an answer just now and did not read in it that the connection ends. 0 if none can, or for probes.
        """
        if not self._leaving or self._server is None or not self._server.connections:
            return 0.0
        if self._handling:
            return _NEXT_REQUEST_S  # ask again then
        since = asyncio.get_running_loop().time() - self._answered_at
        return max(0.0, _NEXT_REQUEST_S - since)

    async def leave(self) -> None:
        """Stop listening.

        Open connections end with the next answer whose head can still say so: a client that sends a request
        after an answer without it, because the connection is open, must not lose it.
        """
        self._leaving = True
        if self._runner is not None:
            for site in list(self._runner.sites):
                await site.stop()

    async def close(self) -> None:
        """Stop listening and drop open connections."""
        if self._runner is not None:
            await self._runner.cleanup()

    def _is_spare(self, connection: Any) -> bool:
        return self._server is not None and self._server.is_spare(connection)

    def _ends_connection(self, connection: Any) -> bool:
        """Return whether an answer that begins now is the last one of its connection."""
        return self._leaving or self._is_spare(connection)

    async def _respond(self, request: web.BaseRequest) -> web.StreamResponse:
        operator = _OPERATOR.get(request.path.rstrip("/"))
        if operator is None:
            if self._is_spare(request.protocol):
                later = {"Retry-After": str(_RETRY_AFTER_S)}
                return _text(HTTPStatus.SERVICE_UNAVAILABLE, "too many connections\n", later)
            if self._certificates and not _has_certificate(request):
                return _text(HTTPStatus.FORBIDDEN, "a client certificate is required\n")
            if self._api is not None:
                self._handling += 1
                try:
                    return await self._api(request)
                finally:
                    self._handling -= 1
                    self._answered_at = asyncio.get_running_loop().time()
            return _text(HTTPStatus.NOT_FOUND, f"{', '.join(_OPERATOR)}\n")
        if request.method not in ("GET", "HEAD"):
            return _text(HTTPStatus.METHOD_NOT_ALLOWED, "only GET and HEAD\n", {"Allow": "GET, HEAD"})
        return operator(self, request)

    def _health(self, _: web.BaseRequest) -> web.Response:
        if self._alive():
            return _text(HTTPStatus.OK, "alive\n")
        return _text(HTTPStatus.SERVICE_UNAVAILABLE, "stuck\n")

    def _readiness(self, request: web.BaseRequest) -> web.Response:
        worker, model = request.query.get("worker", ""), request.query.get("model", "")
        if worker and self._gives_work is not None:
            ready, why = self._gives_work(worker), "this gateway gives the worker nothing new"
        elif model and self._lacks is not None:
            why = self._lacks(model)
            ready = not why
        else:
            ready, why = self._ready(), self._why_not_ready()
        if ready:
            return _text(HTTPStatus.OK, "ready\n")
        return _text(HTTPStatus.SERVICE_UNAVAILABLE, f"not ready: {why}\n" if why else "not ready\n")

    def _metrics(self, _: web.BaseRequest) -> web.Response:
        return web.Response(
            body=generate_latest(self._registry), headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4}
        )

    def _version(self, _: web.BaseRequest) -> web.Response:
        said = {"version": __version__, "config_digest": self._config_digest}
        if self._computes:
            said["computes"] = self._computes
        return web.Response(text=json.dumps(said), content_type="application/json")


_OPERATOR: dict[str, Callable[[HttpEdge, web.BaseRequest], web.Response]] = {
    "/health": HttpEdge._health,
    "/ready": HttpEdge._readiness,
    "/metrics": HttpEdge._metrics,
    "/version": HttpEdge._version,
}


def _has_certificate(request: web.BaseRequest) -> bool:
    return request.transport is not None and bool(request.transport.get_extra_info("peercert"))


def _text(status: HTTPStatus, body: str, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(status=status, text=body, content_type=_TEXT, headers=headers)


class _Request(web.BaseRequest):
    """Request whose answer's head says whether the connection ends: at the answer's end it is too late."""

    ends_connection: Callable[[Any], bool]

    @property
    def keep_alive(self) -> bool:
        return super().keep_alive and not self.ends_connection(self.protocol)


class _Spare(NamedTuple):
    """A connection beyond the limit, and the timer that ends it."""

    transport: asyncio.Transport
    timer: asyncio.TimerHandle


class _ServerLog(logging.LoggerAdapter[logging.Logger]):
    """aiohttp's log. Port scanners and gRPC clients at the wrong port cost one line, without their bytes."""

    def __init__(self) -> None:
        super().__init__(logging.getLogger("aiohttp.server"))

    def exception(self, msg: object, *args: Any, exc_info: Any = True, **kwargs: Any) -> None:
        if isinstance(exc_info, HttpProcessingError):
            self.info("%s does not speak HTTP: %s", args[0] if args else "a client", type(exc_info).__name__)
        else:
            super().exception(msg, *args, exc_info=exc_info, **kwargs)


class _Server(web.Server):
    """aiohttp's server without its application layer: routes are few, and a token stream needs no more."""

    def __init__(
        self,
        handler: HttpApi,
        ends_connection: Callable[[Any], bool],
        max_body_bytes: int,
        limits: ConnectionLimits,
    ) -> None:
        super().__init__(
            handler,
            request_factory=self._request,
            handler_cancellation=True,
            access_log=None,
            logger=_ServerLog(),
            keepalive_timeout=IDLE_S,
            lingering_time=1.0,
            # A compressed body could be a thousand times its size; no client sends one.
            auto_decompress=False,
        )
        self._ends_connection = ends_connection
        self._max_body_bytes = max_body_bytes
        self._limits = limits
        self._spare: dict[Any, _Spare] = {}  # those beyond the limit, the oldest first

    def is_spare(self, handler: Any) -> bool:
        """Return whether it came when clients had all connections."""
        return handler in self._spare

    def connection_made(self, handler: Any, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        beyond = len(self.connections) - self._limits.http
        if beyond > 0:
            _log.debug("too many HTTP connections")
            if beyond > self._limits.spare and not self._end_silent_spare():
                transport.abort()
                return
            self._spare[handler] = _Spare(transport, self._loop.call_later(_SPARE_S, transport.abort))
        tcp = transport.get_extra_info("socket")
        if tcp is not None and hasattr(socket, "TCP_USER_TIMEOUT"):
            tcp.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(STALL_S * 1000))

    def _end_silent_spare(self) -> bool:
        """End the oldest spare connection without a request: a probe sends one at once. False without one."""
        for handler, spare in self._spare.items():
            if handler._current_request is None:
                del self._spare[handler]
                spare.timer.cancel()
                spare.transport.abort()
                return True
        return False

    def connection_lost(self, handler: Any, exc: BaseException | None = None) -> None:
        super().connection_lost(handler, exc)
        spare = self._spare.pop(handler, None)
        if spare is not None:
            spare.timer.cancel()

    def _request(
        self, message: Any, payload: Any, protocol: Any, writer: Any, task: "asyncio.Task[None]"
    ) -> web.BaseRequest:
        request = _Request(
            message, payload, protocol, writer, task, self._loop, client_max_size=self._max_body_bytes
        )
        request.ends_connection = self._ends_connection
        return request


async def read_body(request: web.BaseRequest, timeout_s: float) -> bytes:
    """Read the whole body.

    Raises HTTPRequestEntityTooLarge, RequestPayloadError (malformed) and TimeoutError.
    """
    if request.headers.get("Expect", "").lower() == "100-continue":
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # what was sent is no part of the response
    async with asyncio.timeout(timeout_s):
        return await request.read()
