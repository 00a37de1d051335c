"""Links over gRPC, between any two machines."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Iterable
from typing import Any

import grpc

from diptych.runtime.internal_tls import InternalTls, NotTrusted, explain_handshake, name_of, require_role
from diptych.runtime.rpc import make_channel
from diptych.runtime.rpc_streams.method import LinkMethod
from diptych.runtime.rpc_streams.stream import LinkService, Refused, StreamLost

_ENDS = (grpc.RpcError, grpc.aio.UsageError, grpc.aio.InternalError, asyncio.InvalidStateError)
"""Errors that grpc.aio raises where a call is over, by the place in which one finds out."""
_MOST_TOLD = 100
_log = logging.getLogger(__name__)


class _GrpcStream:
    """Base of both ends: grpc.aio's calls and contexts are read and written alike."""

    def __init__(self, rpc: Any) -> None:
        self._rpc = rpc
        self._cancelled = False  # by this end

    async def read(self) -> Any:
        message = await self._told(self._rpc.read())
        return None if message is grpc.aio.EOF else message

    async def write(self, message: Any) -> None:
        await self._told(self._rpc.write(message))

    async def _told(self, operation: Awaitable[Any]) -> Any:
        """Await a call's result. Raises StreamLost."""
        try:
            return await operation
        except _ENDS as error:
            raise _lost(error) from error
        except asyncio.CancelledError:
            if self._cancelled:
                raise StreamLost(grpc.StatusCode.CANCELLED, "by this end") from None
            raise


class GrpcCall(_GrpcStream):
    """A stream that this process opened."""

    def __init__(self, address: str, method: LinkMethod, tls: InternalTls | None = None) -> None:
        """Begin to connect; whether that works is told by the first read or write."""
        if tls is None:
            self._channel = make_channel(address)
        else:
            credentials = tls.channel_credentials()
            self._channel = make_channel(address, credentials, peer_name=name_of(method.server))
        open_call = self._channel.stream_stream(
            method.path,
            request_serializer=method.request.SerializeToString,
            response_deserializer=method.response.FromString,
        )
        super().__init__(open_call())

    def cancel(self) -> None:
        self._cancelled = True
        self._rpc.cancel()

    async def close(self) -> None:
        self.cancel()
        await self._channel.close()


class GrpcServed(_GrpcStream):
    """A stream that another process opened to this one, by its context."""


def add_links(
    server: grpc.aio.Server, services: Iterable[LinkService], *, authenticated: bool = False
) -> None:
    """Serve these links on a gRPC server that has not started.

    Args:
        authenticated: whether its port demands certificates: then that of the method's client is checked.
    """
    for service in services:
        method = service.method
        handler = grpc.stream_stream_rpc_method_handler(
            _handler(service, authenticated),
            request_deserializer=method.request.FromString,
            response_serializer=method.response.SerializeToString,
        )
        generic = grpc.method_handlers_generic_handler(method.service, {method.rpc: handler})
        server.add_generic_rpc_handlers((generic,))


def _handler(service: LinkService, authenticated: bool) -> Any:
    refused: set[str] = set()  # told once, not at every try

    async def handle(_: object, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        try:
            if authenticated:
                _require_client(context, service.method.client)
            await service.serve(GrpcServed(context))
        except NotTrusted as error:
            if str(error) not in refused and len(refused) < _MOST_TOLD:
                refused.add(str(error))
                _log.warning("%s refuses %s: %s", service.method.service, context.peer(), error)
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, str(error))
        except Refused as refusal:
            await context.abort(refusal.code, refusal.details)
        except StreamLost:
            return  # the other end is gone

    return handle


def _require_client(context: grpc.aio.ServicerContext[Any, Any], role: str) -> None:
    """Raise NotTrusted unless the caller's certificate, which gRPC has verified, is that of the role."""
    names: Iterable[bytes] = context.auth_context().get("x509_subject_alternative_name", ())
    require_role([name.decode(errors="replace") for name in names], role)


def _lost(error: Exception) -> StreamLost:
    if isinstance(error, grpc.aio.AioRpcError):
        if (why := explain_handshake(error.details() or "")) is not None:
            return StreamLost(grpc.StatusCode.UNAUTHENTICATED, why)
        return StreamLost(error.code(), error.details() or "")
    return StreamLost(grpc.StatusCode.UNAVAILABLE, str(error) or type(error).__name__)
