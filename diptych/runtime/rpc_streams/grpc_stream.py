"""Links over gRPC, between any two machines."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable
from typing import Any

import grpc

from diptych.runtime.rpc import make_channel
from diptych.runtime.rpc_streams.method import LinkMethod
from diptych.runtime.rpc_streams.stream import LinkService, Refused, StreamLost

_ENDS = (grpc.RpcError, grpc.aio.UsageError, grpc.aio.InternalError, asyncio.InvalidStateError)
"""Errors that grpc.aio raises where a call is over, by the place in which one finds out."""


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

    def __init__(self, address: str, method: LinkMethod) -> None:
        """Begin to connect; whether that works is told by the first read or write."""
        self._channel = make_channel(address)
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


def add_links(server: grpc.aio.Server, services: Iterable[LinkService]) -> None:
    """Serve these links on a gRPC server that has not started."""
    for service in services:
        method = service.method
        handler = grpc.stream_stream_rpc_method_handler(
            _handler(service),
            request_deserializer=method.request.FromString,
            response_serializer=method.response.SerializeToString,
        )
        generic = grpc.method_handlers_generic_handler(method.service, {method.rpc: handler})
        server.add_generic_rpc_handlers((generic,))


def _handler(service: LinkService) -> Any:
    async def handle(_: object, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        try:
            await service.serve(GrpcServed(context))
        except Refused as refusal:
            await context.abort(refusal.code, refusal.details)
        except StreamLost:
            return  # the other end is gone

    return handle


def _lost(error: Exception) -> StreamLost:
    if isinstance(error, grpc.aio.AioRpcError):
        return StreamLost(error.code(), error.details() or "")
    return StreamLost(grpc.StatusCode.UNAVAILABLE, str(error) or type(error).__name__)
