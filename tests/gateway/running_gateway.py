"""Gateway in this process on real ports, with a real Valkey and scripted workers."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from prometheus_client import CollectorRegistry

from diptych.cli.valkey import valkey_binary
from diptych.v1 import inference_pb2 as pb
from diptych.v1 import inference_pb2_grpc
from gateway.config import GatewaySettings
from gateway.model.served_model import ServedModel
from gateway.program import Gateway
from gateway.served_models.core import ModelCore
from gateway.served_models.loading import LoadedModel
from tests.gateway.scripted_workers import ScriptedDecode, ScriptedPrefill, ScriptedWorker

DIGEST = "d" * 64
SECRET = "ab" * 32


@contextlib.contextmanager
def valkey() -> Iterator[str]:
    """Run a server on a free port; yield its URL."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [str(valkey_binary()), "--port", str(port), "--bind", "127.0.0.1", "--save", ""]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        for _ in range(200):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 0.1):
                break
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        process.kill()
        process.wait()


async def until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Wait for what nothing announces."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@dataclass
class Stack:
    """A gateway that is ready, and how to talk to it."""

    gateway: Gateway
    channel: grpc.aio.Channel
    redis_url: str
    model: ServedModel

    @property
    def stub(self) -> Any:
        return inference_pb2_grpc.InferenceServiceStub(self.channel)

    @property
    def core(self) -> ModelCore:
        """The core of the one model, or of the first."""
        return self.gateway.models.first

    @property
    def registry(self) -> CollectorRegistry:
        return self.gateway.registry

    async def until_ready(self, ready: bool = True) -> None:
        await until(lambda: self.gateway.ready is ready)

    async def until_idle(self) -> None:
        """Wait until no request has left anything in the gateway."""
        async with asyncio.timeout(60):
            await self.gateway.calls.idle()
        assert len(self.gateway.live) == 0
        queue = self.core.gate.queue
        queue.invariants()
        assert (queue.running, queue.waiting, queue.waiting_tokens) == (0, 0, 0)

    def request(self, prompt: str = "Hello", **fields: Any) -> pb.GenerateRequest:
        return pb.GenerateRequest(model=self.model.card.name, text=prompt, **fields)


@contextlib.asynccontextmanager
async def running(
    model: ServedModel, redis_url: str, *workers: ScriptedWorker, **settings: Any
) -> AsyncIterator[Stack]:
    """Workers first, then the gateway; ready when one of each role is there."""
    for worker in workers:
        await worker.start(redis_url, DIGEST)
    values = GatewaySettings(
        redis_url=redis_url, grpc_port=0, http_port=0, secret=SECRET, **{"shutdown_timeout": 0.5, **settings}
    )
    gateway = Gateway(values, [LoadedModel(model, DIGEST)])
    await gateway.start()
    channel = grpc.aio.insecure_channel(f"127.0.0.1:{gateway.grpc_port}")
    stack = Stack(gateway, channel, redis_url, model)
    roles = {type(w) for w in workers}
    if {ScriptedPrefill, ScriptedDecode} <= roles:
        await stack.until_ready()
    try:
        yield stack
    finally:
        await channel.close()
        await gateway.close()
        for worker in workers:
            await worker.close()


async def collect(call: Any) -> list[pb.GenerateResponse]:
    """Return all remaining messages; raise the RPC's error."""
    messages = []
    while (message := await call.read()) is not grpc.aio.EOF:
        messages.append(message)
    return messages


def text_of(messages: list[pb.GenerateResponse]) -> str:
    return "".join(output.text for message in messages for output in message.outputs)


def ids_of(messages: list[pb.GenerateResponse]) -> list[int]:
    return [i for message in messages for output in message.outputs for i in output.token_ids]


def reason_of(error: grpc.aio.AioRpcError) -> str:
    """Return the ErrorInfo reason in the rich details."""
    status = rpc_status.from_call(error)
    info = error_details_pb2.ErrorInfo()
    assert status is not None
    assert any(detail.Unpack(info) for detail in status.details)
    return info.reason
