"""A real grpc.aio server of the public service, whose answers come at scripted times."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf.duration_pb2 import Duration

from diptych.v1 import inference_pb2 as pb
from diptych.v1 import inference_pb2_grpc as rpc


def milliseconds(value: int) -> Duration:
    return Duration(nanos=value * 1_000_000)


@dataclass
class ScriptedService(rpc.InferenceServiceServicer):
    """Each answer: `ttft` seconds of silence, then a message of `per_message` tokens every `itl` seconds.

    Every `refuse_every`th request is refused as a full queue is, and streams break after `break_after`
    messages.
    """

    ttft: float = 0.0
    itl: float = 0.0
    per_message: int = 1
    word: str = " a"
    refuse_every: int | None = None
    break_after: int | None = None
    seen: list[pb.GenerateRequest] = field(default_factory=list)
    keys: list[str | bytes | None] = field(default_factory=list)
    running: int = 0
    most_running: int = 0

    async def ListModels(self, request: Any, context: Any) -> pb.ListModelsResponse:
        self.keys.append(dict(context.invocation_metadata()).get("authorization"))
        return pb.ListModelsResponse(models=[pb.Model(name="scripted")])

    async def StreamGenerate(
        self, request: pb.GenerateRequest, context: Any
    ) -> AsyncIterator[pb.GenerateResponse]:
        self.seen.append(request)
        self.keys.append(dict(context.invocation_metadata()).get("authorization"))
        if self.refuse_every and len(self.seen) % self.refuse_every == 0:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "the queue is full")
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            yield pb.GenerateResponse(model="scripted", prompt=pb.PromptInfo(token_count=1))
            await asyncio.sleep(self.ttft)
            sent = 0
            while sent < request.stopping.max_tokens:
                if self.break_after is not None and sent >= self.break_after * self.per_message:
                    await context.abort(grpc.StatusCode.ABORTED, "the worker was lost")
                if sent:
                    await asyncio.sleep(self.itl)
                count = min(self.per_message, request.stopping.max_tokens - sent)
                sent += count
                yield pb.GenerateResponse(
                    outputs=[pb.OutputDelta(text=self.word * count, token_ids=[7] * count)]
                )
            yield self._last(request, sent)
        finally:
            self.running -= 1

    def _last(self, request: pb.GenerateRequest, sent: int) -> pb.GenerateResponse:
        prompt = len(request.token_ids.ids) or 5
        return pb.GenerateResponse(
            outputs=[pb.OutputDelta(finish_reason=pb.FINISH_REASON_LENGTH)],
            usage=pb.Usage(prompt_tokens=prompt, completion_tokens=sent, cached_prompt_tokens=1),
            timings=pb.Timings(
                queue=milliseconds(3),
                prefill=milliseconds(40),
                kv_transfer=milliseconds(2),
                time_to_first_token=milliseconds(48),
            ),
        )


@asynccontextmanager
async def serving(service: ScriptedService) -> AsyncIterator[str]:
    """Its address, on a free port of the loopback."""
    server = grpc.aio.server()
    rpc.add_InferenceServiceServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)
