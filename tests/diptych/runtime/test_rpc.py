"""Servers and channels with real peers, frozen ones included."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from diptych.runtime.bind_address import UnsafeBindError
from diptych.runtime.rpc import (
    MAX_METADATA_BYTES,
    add_health_and_reflection,
    bind,
    drain,
    make_channel,
    make_server,
)

SERVICE = "diptych.v1.InferenceService"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING

FROZEN_SERVER = """
import asyncio, grpc
from diptych.runtime.rpc import bind, make_server
async def stream(request, context):
    yield b"first"
    await asyncio.sleep(60)
async def main():
    server = make_server(internal=True)
    handler = grpc.unary_stream_rpc_method_handler(stream)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t.T", {"Stream": handler}),))
    port = bind(server, "127.0.0.1", 0, insecure=False)
    await server.start()
    print(port, flush=True)
    await server.wait_for_termination()
asyncio.run(main())
"""


async def _echo(request: bytes, context: Any) -> bytes:
    return request


async def _slow(request: bytes, context: Any) -> bytes:
    await asyncio.sleep(float(request))
    return b"done"


@asynccontextmanager
async def serving(**options: Any) -> AsyncIterator[tuple[grpc.aio.Server, int]]:
    server = make_server(internal=True, **options)
    handlers = {
        "Echo": grpc.unary_unary_rpc_method_handler(_echo),
        "Slow": grpc.unary_unary_rpc_method_handler(_slow),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t.T", handlers),))
    port = bind(server, "127.0.0.1", 0, insecure=False)
    await server.start()
    yield server, port
    await server.stop(0)


async def test_a_frozen_peer_is_noticed_in_seconds() -> None:
    """A stopped process's kernel still answers TCP; gRPC's defaults would wait for a minute."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", FROZEN_SERVER, cwd=Path(__file__).parents[3], stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    port = int(await process.stdout.readline())
    try:
        async with make_channel(f"127.0.0.1:{port}") as channel:
            call = channel.unary_stream("/t.T/Stream")(b"")
            assert await call.read() == b"first"
            os.kill(process.pid, signal.SIGSTOP)
            start = time.monotonic()
            with pytest.raises(grpc.aio.AioRpcError) as info:
                await asyncio.wait_for(call.read(), 20)
            assert info.value.code() is grpc.StatusCode.UNAVAILABLE
            assert time.monotonic() - start < 15
    finally:
        process.kill()
        await process.wait()


async def test_pings_do_not_end_a_long_silent_call() -> None:
    """Keepalive pings come every second; the server must not call them too many."""
    async with serving() as (_, port), make_channel(f"127.0.0.1:{port}") as channel:
        assert await channel.unary_unary("/t.T/Slow")(b"5") == b"done"


async def test_message_and_metadata_limits() -> None:
    async with serving(max_message_bytes=1000) as (_, port), make_channel(f"127.0.0.1:{port}") as channel:
        echo = channel.unary_unary("/t.T/Echo")
        assert len(await echo(bytes(1000))) == 1000
        with pytest.raises(grpc.aio.AioRpcError) as info:
            await echo(bytes(1001))
        assert info.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await echo(b"", metadata=[("x-a", "a" * (MAX_METADATA_BYTES // 2))]) == b""
        with pytest.raises(grpc.aio.AioRpcError) as info:
            await echo(b"", metadata=[("x-a", "a" * (MAX_METADATA_BYTES + 1))])
        assert info.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_more_calls_than_allowed_are_refused_at_once() -> None:
    async with (
        serving(maximum_concurrent_rpcs=1) as (_, port),
        make_channel(f"127.0.0.1:{port}") as channel,
    ):
        slow = channel.unary_unary("/t.T/Slow")(b"1")
        await asyncio.sleep(0.2)
        with pytest.raises(grpc.aio.AioRpcError) as info:
            await channel.unary_unary("/t.T/Echo")(b"")
        assert info.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await slow == b"done"


async def test_unsafe_and_taken_addresses_are_refused() -> None:
    async with serving() as (_, port):
        other = make_server(internal=False)
        with pytest.raises(OSError, match=str(port)):
            bind(other, "127.0.0.1", port, insecure=False)
        with pytest.raises(UnsafeBindError):
            bind(other, "0.0.0.0", 0, insecure=False)
        assert bind(other, "0.0.0.0", 0, insecure=True) > 0
        await other.stop(0)


async def test_proxies_of_the_environment_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    monkeypatch.setenv("no_proxy", "")
    async with serving() as (_, port), make_channel(f"127.0.0.1:{port}") as channel:
        assert await channel.unary_unary("/t.T/Echo")(b"x", timeout=60) == b"x"


async def test_health_tells_readiness_and_drain_lets_calls_finish() -> None:
    server = make_server(internal=False)
    handler = grpc.unary_unary_rpc_method_handler(_slow)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t.T", {"Slow": handler}),))
    health = await add_health_and_reflection(server, [SERVICE])
    port = bind(server, "127.0.0.1", 0, insecure=False)
    await server.start()
    async with make_channel(f"127.0.0.1:{port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)

        async def status(service: str) -> int:
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=service))
            return int(answer.status)

        assert (await status(""), await status(SERVICE)) == (SERVING, NOT_SERVING)
        await health.set_ready(True)
        assert await status(SERVICE) == SERVING
        finishing = channel.unary_unary("/t.T/Slow")(b"0.8")
        cut_off = channel.unary_unary("/t.T/Slow")(b"30")
        await asyncio.sleep(0.1)
        draining = asyncio.create_task(drain(server, health, settle_s=0.3, grace_s=1.0))
        await asyncio.sleep(0.1)
        assert (await status(""), await status(SERVICE)) == (SERVING, NOT_SERVING)
        assert await finishing == b"done"
        with pytest.raises((grpc.aio.AioRpcError, asyncio.CancelledError)):
            await cut_off
        await draining


async def test_reflection_lists_the_services() -> None:
    server = make_server(internal=False)
    await add_health_and_reflection(server, [SERVICE])
    port = bind(server, "127.0.0.1", 0, insecure=False)
    await server.start()
    async with make_channel(f"127.0.0.1:{port}") as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        call = stub.ServerReflectionInfo(
            iter([reflection_pb2.ServerReflectionRequest(list_services="")]), timeout=5
        )
        answer = await call.read()
        names = {service.name for service in answer.list_services_response.service}
        assert {SERVICE, "grpc.health.v1.Health"} <= names
        call.cancel()
    await server.stop(0)
