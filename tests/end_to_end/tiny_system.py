"""The whole system over a small random model, and one way to ask it for anything."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from diptych.v1 import inference_pb2 as pb
from diptych.v1 import inference_pb2_grpc as rpc
from tests.end_to_end import tiny_model
from tests.end_to_end.stack import Stack, running_stack

LENGTHS = (1, 5, 16, 33, 64, 100)  # block borders, several chunks
PROMPTS = [tiny_model.prompt(seed, length) for seed, length in enumerate(LENGTHS)]


@dataclass(frozen=True)
class Served:
    """A running system and the folder of its model."""

    stack: Stack
    folder: Path

    @property
    def eos(self) -> int:
        eos: int = tiny_model.oracle(self.folder).config.eos_token_id
        return eos

    def ask(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        streamed: bool = False,
        sampling: dict[str, Any] | None = None,
        stopping: dict[str, Any] | None = None,
        response: dict[str, Any] | None = None,
    ) -> list[pb.GenerateResponse]:
        """Whole answers to all prompts at once; streamed ones are put together here."""
        requests = [
            pb.GenerateRequest(
                model="tiny",
                token_ids=pb.TokenIds(ids=ids),
                sampling=sampling,
                stopping=stopping,
                response=response,
            )
            for ids in prompts
        ]

        async def all_of_them() -> list[pb.GenerateResponse]:
            async with grpc.aio.insecure_channel(self.stack.address) as channel:
                stub = rpc.InferenceServiceStub(channel)
                return await asyncio.gather(*(one(stub, request) for request in requests))

        async def one(stub: Any, request: pb.GenerateRequest) -> pb.GenerateResponse:
            if not streamed:
                answer: pb.GenerateResponse = await stub.Generate(request, timeout=60)
                return answer
            whole = pb.GenerateResponse()
            by_index: dict[int, pb.OutputDelta] = {}
            async for message in stub.StreamGenerate(request, timeout=60):
                for output in message.outputs:
                    by_index.setdefault(output.index, pb.OutputDelta()).MergeFrom(output)
                del message.outputs[:]
                whole.MergeFrom(message)
            whole.outputs.extend(by_index[index] for index in sorted(by_index))
            return whole

        return asyncio.run(all_of_them())


@contextlib.contextmanager
def serving(folder: Path, transport: str) -> Iterator[Served]:
    """A pool that is too small for all that is asked at once, so that some of it is preempted."""
    flags = ["--model", str(folder), "--model-name", "tiny", "--dtype", "fp32", "--prefill-chunk", "48"]
    with running_stack(*flags, "--kv-blocks", "64", "--transport", transport) as stack:
        yield Served(stack, folder)
        stack.wait_idle()


def tokens(answer: pb.GenerateResponse) -> list[list[int]]:
    """Of each output, in order."""
    assert [output.index for output in answer.outputs] == list(range(len(answer.outputs)))
    return [list(output.token_ids) for output in answer.outputs]
