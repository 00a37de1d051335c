"""gRPC servers and channels with the options that this system needs, health, reflection, drain.

What the options are for (all measured against grpcio 1.8x):

- `min_ping_interval_without_data_ms` and `max_ping_strikes`: a client that pings while a long prefill
  produces no data must not be disconnected for "too many pings".
- keepalive with `ping_timeout_ms` on links between our own processes: a peer that is stopped but
  whose kernel still answers TCP is noticed after a second, not after gRPC's default of a minute.
- pending calls: gRPC drops calls at random, without a status, once 1,000 have arrived that the program has
  not taken yet, and all beyond 3,000. Our own limits on calls lie below, and answer.
- both metadata limits equal: between the soft and the hard one gRPC rejects at random.
- `so_reuseport` off unless `share_port`: with gRPC's default two processes bind one port and each gets half
  the calls. Wanted only for the moment in which a process takes over from its predecessor.
"""

import asyncio
from collections.abc import Sequence

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc  # type: ignore[import-untyped]
from grpc_reflection.v1alpha import reflection  # type: ignore[import-untyped]

from diptych.runtime.bind_address import CannotListen, join_host_port, require_safe_bind
from diptych.runtime.descriptors import connection_limits

MAX_MESSAGE_BYTES = 8 << 20
"""The largest message that a peer may send: a prompt of a million tokens fits, a flood does not."""

MAX_METADATA_BYTES = 16 << 10
MAX_CONCURRENT_STREAMS = 1024

_PENDING_CALLS = 1 << 20
"""Calls that may lie in gRPC's queue until the event loop takes them: more than there can be streams."""

_IDLE_MS = 300_000
"""Time after which a client's connection without a call is closed; its next call makes another one."""
_HANDSHAKE_MS = 10_000
"""Time to become a connection of HTTP/2; in gRPC's two minutes silent ones take all places."""
_FEW_IDLE_MS, _FEW_HANDSHAKE_MS = 10_000, 3000
"""Idle and handshake milliseconds with few descriptors: idle connections make room for probes soon."""
_KEEPALIVE_MS = 1000
_PING_TIMEOUT_MS = 1000

Option = tuple[str, int | str]


def server_options(
    *,
    internal: bool,
    max_message_bytes: int,
    max_concurrent_streams: int,
    share_port: bool = False,
    max_connections: int | None = None,
) -> list[Option]:
    options: list[Option] = [
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", -1),
        ("grpc.max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.max_concurrent_streams", max_concurrent_streams),
        ("grpc.server.max_pending_requests", _PENDING_CALLS),
        ("grpc.server.max_pending_requests_hard_limit", _PENDING_CALLS),
        ("grpc.so_reuseport", int(share_port)),
    ]
    limits = connection_limits()
    constrained = limits.constrained
    options.append(("grpc.max_allowed_incoming_connections", max_connections or limits.grpc))
    options.append(("grpc.server_handshake_timeout_ms", _FEW_HANDSHAKE_MS if constrained else _HANDSHAKE_MS))
    idle_ms = _FEW_IDLE_MS if constrained else _IDLE_MS
    options += _liveness_options() if internal else [("grpc.max_connection_idle_ms", idle_ms)]
    return options


def _liveness_options() -> list[Option]:
    return [
        ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", _PING_TIMEOUT_MS),
        ("grpc.http2.ping_timeout_ms", _PING_TIMEOUT_MS),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.keepalive_permit_without_calls", 1),
    ]


def make_server(
    *,
    internal: bool,
    interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
    max_message_bytes: int = MAX_MESSAGE_BYTES,
    max_concurrent_streams: int = MAX_CONCURRENT_STREAMS,
    maximum_concurrent_rpcs: int | None = None,
    share_port: bool = False,
    max_connections: int | None = None,
) -> grpc.aio.Server:
    """Return a server on the running loop, neither bound nor started.

    `internal`: its clients are our own processes, whose silence for two seconds means death. Beyond
    `maximum_concurrent_rpcs` (None = no bound) gRPC itself answers RESOURCE_EXHAUSTED. Connections beyond
    `max_connections` (default: as many as there are descriptors for) are closed at once.
    """
    return grpc.aio.server(
        interceptors=list(interceptors),
        options=server_options(
            internal=internal,
            max_message_bytes=max_message_bytes,
            max_concurrent_streams=max_concurrent_streams,
            share_port=share_port,
            max_connections=max_connections,
        ),
        maximum_concurrent_rpcs=maximum_concurrent_rpcs,
    )


def make_channel(
    address: str, credentials: grpc.ChannelCredentials | None = None, *, peer_name: str = ""
) -> grpc.aio.Channel:
    """Return a channel to another process of ours.

    It reconnects quickly and gRPC retries nothing by itself. With `peer_name` the certificate there must have
    that name, instead of the address.
    """
    options: list[Option] = [
        *_liveness_options(),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", -1),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 500),
        ("grpc.max_reconnect_backoff_ms", 1000),
        ("grpc.enable_retries", 0),
        # Each link is a connection of its own: one that dies takes no other with it.
        ("grpc.use_local_subchannel_pool", 1),
        # Proxy variables of the environment are for the world outside, not for our workers.
        ("grpc.enable_http_proxy", 0),
    ]
    if peer_name:
        options.append(("grpc.ssl_target_name_override", peer_name))
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, credentials, options=options)


def bind(
    server: grpc.aio.Server,
    host: str,
    port: int,
    insecure: bool,
    credentials: grpc.ServerCredentials | None = None,
) -> int:
    """Bind and returns the port (a free one for 0).

    Raises UnsafeBindError for an address beyond loopback without TLS unless `insecure`, and CannotListen
    when the port is taken.
    """
    require_safe_bind(host, encrypted=credentials is not None, insecure=insecure)
    address = join_host_port(host, port)
    try:
        if credentials is None:
            bound = server.add_insecure_port(address)
        else:
            bound = server.add_secure_port(address, credentials)
    except RuntimeError as error:
        raise _cannot_listen(address) from error
    if bound == 0:
        raise _cannot_listen(address)
    return bound


def _cannot_listen(address: str) -> CannotListen:
    # gRPC writes the reason to stderr and does not tell it here.
    return CannotListen(
        f"cannot listen on {address}: taken by another process, or no address of this machine"
    )


class Health:
    """grpc.health.v1 of one server: "" is liveness, each service's name is its readiness."""

    def __init__(self, services: Sequence[str]) -> None:
        self._services = tuple(services)
        self._servicer = health.aio.HealthServicer()

    async def set_ready(self, ready: bool) -> None:
        status = (
            health_pb2.HealthCheckResponse.SERVING if ready else health_pb2.HealthCheckResponse.NOT_SERVING
        )
        for service in self._services:
            await self._servicer.set(service, status)

    async def start(self, server: grpc.aio.Server) -> None:
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)
        await self._servicer.set("", health_pb2.HealthCheckResponse.SERVING)
        await self.set_ready(False)


async def add_health_and_reflection(server: grpc.aio.Server, services: Sequence[str]) -> Health:
    """Register both for the full names of `services`. They start NOT_SERVING: call `set_ready(True)`.

    Call it after the services were added and before the server starts.
    """
    health = Health(services)
    await health.start(server)
    names = (*services, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)
    return health


async def drain(server: grpc.aio.Server, health: Health, *, settle_s: float, grace_s: float) -> None:
    """Stop gracefully: not ready at once, after `settle_s` no new calls, after `grace_s` the rest ends.

    `settle_s` is the time that load balancers need to see NOT_SERVING. What still runs after the
    grace period is cancelled (the handler sees CancelledError); handlers that can say more to their
    clients end their calls earlier.
    """
    await health.set_ready(False)
    await asyncio.sleep(settle_s)
    await server.stop(grace_s)
