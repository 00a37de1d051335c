"""Opening a link: the shortest way there is to the other end."""

from __future__ import annotations

from runtime.links import local
from runtime.links.method import LinkMethod
from runtime.links.over_grpc import GrpcCall
from runtime.links.stream import ClientStream


async def open_link(address: str, method: LinkMethod) -> ClientStream:
    """A stream to the worker at host:port. Raises StreamLost, or the first read or write does."""
    return await local.connect(address, method) or GrpcCall(address, method)
