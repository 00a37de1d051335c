"""Workers that are played by this process: no engine, but the messages of one at the pace of a fast one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import grpc

from diptych.runtime.discovery.publisher import DirectoryPublisher
from diptych.runtime.discovery.records import Role, WorkerRecord
from diptych.runtime.rpc import bind, make_server
from diptych.worker.v1 import decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc, work_pb2

OUTPUT = tuple(range(2000, 2400))  # ordinary words' tokens; an answer repeats them
BEAT_S = 0.25


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
    """Serve a scripted worker on a port and register it in the directory."""
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


@asynccontextmanager
async def played_workers(redis_url: str, digest: str, step_s: float) -> AsyncIterator[None]:
    """Serve one worker of each role; each running request gets a token every ``step_s``."""
    decode = DecodePlayer(step_s)
    async with AsyncExitStack() as stack:
        for player in (PrefillPlayer(), decode):
            await stack.enter_async_context(playing(player, redis_url, digest))
        stepping = asyncio.create_task(decode.run())
        stack.callback(stepping.cancel)
        yield
