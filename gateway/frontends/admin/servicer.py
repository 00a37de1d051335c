"""``diptych.v1.AdminService`` on a port of its own, with health and reflection of its own."""

from __future__ import annotations

import grpc

from diptych.runtime.descriptors import connection_limits
from diptych.runtime.rpc import add_health_and_reflection, bind, make_server
from diptych.v1 import admin_pb2 as pb
from gateway.call import Calls
from gateway.frontends.admin.operations import Operations
from gateway.frontends.grpc.grpc_service import Body, add_service, plain

DESCRIPTOR = pb.DESCRIPTOR.services_by_name["AdminService"]
MAX_REQUEST_BYTES = 64 * 1024


class AdminServicer:
    """Serves operators until closed. It is ready as long as it is there: they come when things go wrong."""

    def __init__(self, server: grpc.aio.Server, port: int) -> None:
        self._server = server
        self.port = port

    @classmethod
    async def start(
        cls,
        host: str,
        port: int,
        calls: Calls,
        operations: Operations,
        *,
        insecure: bool,
        credentials: grpc.ServerCredentials | None = None,
        share_port: bool = False,
    ) -> AdminServicer:
        """Bind (0 = any free port) and serve. Raises OSError or UnsafeBindError."""
        server = make_server(
            internal=False,
            max_message_bytes=MAX_REQUEST_BYTES,
            share_port=share_port,
            max_connections=connection_limits().admin,
        )
        add_service(server, calls, DESCRIPTOR, bodies(operations))
        health = await add_health_and_reflection(server, [DESCRIPTOR.full_name])
        bound = bind(server, host, port, insecure, credentials)
        await server.start()
        await health.set_ready(True)
        return cls(server, bound)

    async def close(self) -> None:
        await self._server.stop(grace=0.2)


def bodies(operations: Operations) -> dict[str, Body]:
    """Every RPC of the service."""
    return {
        "GetServerInfo": plain(operations.server_info),
        "ListWorkers": plain(operations.list_workers),
        "WatchLoad": operations.watch_load,
        "DrainWorker": plain(operations.drain_worker),
        "FlushPrefixCache": plain(operations.flush_prefix_cache),
    }
