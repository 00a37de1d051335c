"""Server of a worker's streams for processes of the same host."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Sequence

import grpc

from diptych.runtime.rpc_streams.stream import LinkService, Refused, StreamLost
from diptych.runtime.rpc_streams.unix_stream import (
    READ_AHEAD_BYTES,
    FrameKind,
    UnixStream,
    read_frame,
    same_user,
    socket_name,
)

_OPEN_WITHIN_S = 3.0
_log = logging.getLogger(__name__)


class UnixServer:
    """Listens on an abstract Unix socket that is named after the worker's address: no file is left behind."""

    def __init__(self, services: Sequence[LinkService]) -> None:
        self._services = {service.method.path: service for service in services}
        self._server: asyncio.Server | None = None
        self._streams: set[asyncio.Task[None]] = set()

    async def open(self, address: str) -> None:
        """Serve who connects to host:port on this machine. Where that name is taken, links go over gRPC."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            listener.bind(socket_name(address))
        except OSError as error:
            listener.close()
            _log.warning("no links within this host, only over gRPC: %s", error)
            return
        self._server = await asyncio.start_unix_server(
            self._connected, sock=listener, limit=READ_AHEAD_BYTES // 2
        )

    async def close(self, grace_s: float = 0.0) -> None:
        """Listen no more, and end every stream after `grace_s`, in which what was said last is written."""
        if self._server is not None:
            self._server.close()
        if self._streams and grace_s > 0:
            await asyncio.wait(self._streams, timeout=grace_s)
        for task in self._streams:
            task.cancel()
        await asyncio.gather(*self._streams, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("a connection is served in a task of its own")
        self._streams.add(task)
        task.add_done_callback(self._streams.discard)
        try:
            service = await self._wanted(reader) if same_user(writer.get_extra_info("socket")) else None
            if service is not None:
                await _serve(service, UnixStream(reader, writer, service.method.request))
        except asyncio.CancelledError:
            pass  # by `close`; asyncio's streams take a handler that ends cancelled for a fault, and log it
        finally:
            writer.close()

    async def _wanted(self, reader: asyncio.StreamReader) -> LinkService | None:
        """Return the service that the other end opens; None if it names none in time, or an unknown one."""
        try:
            async with asyncio.timeout(_OPEN_WITHIN_S):
                frame = await read_frame(reader)
        except (StreamLost, TimeoutError):
            return None
        return (
            self._services.get(frame.body.decode(errors="replace")) if frame.kind == FrameKind.OPEN else None
        )


async def _serve(service: LinkService, stream: UnixStream) -> None:
    """Serve a stream from its first message to its end, which is sent to the other end."""
    try:
        await service.serve(stream)
    except Refused as refusal:
        stream.end(refusal.code, refusal.details)
    except StreamLost:
        stream.cancel()
    except asyncio.CancelledError:
        stream.end(grpc.StatusCode.CANCELLED)
        raise
    except Exception:
        _log.exception("a link ends by an error")
        stream.end(grpc.StatusCode.INTERNAL)
    else:
        stream.end(grpc.StatusCode.OK)
