"""Opening a link: the shortest way there is to the other end."""

from __future__ import annotations

from diptych.runtime.internal_tls import InternalTls
from diptych.runtime.rpc_streams import unix_stream as local
from diptych.runtime.rpc_streams.grpc_stream import GrpcCall
from diptych.runtime.rpc_streams.method import LinkMethod
from diptych.runtime.rpc_streams.stream import ClientStream


async def open_link(address: str, method: LinkMethod, tls: InternalTls | None = None) -> ClientStream:
    """Return a stream to the worker at host:port. Raises StreamLost, or the first read or write does.

    Within a host it is a Unix socket between processes of one user, which has no use for `tls`.
    """
    return await local.connect(address, method) or GrpcCall(address, method, tls)
