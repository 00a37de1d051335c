"""The whole system over a small random model, and one way to ask it for anything."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from diptych.runtime.tokenizer.tokenizer import Tokenizer
from diptych.v1 import inference_pb2 as pb
from diptych.v1 import inference_pb2_grpc as rpc
from tests.end_to_end import tiny_model
from tests.end_to_end.stack import Stack, running_stack

MODEL = "tiny"
TEMPLATE = Path(__file__).with_name("tool_template.jinja")
LENGTHS = (1, 5, 16, 33, 64, 100)  # block borders, several chunks
PROMPTS = [tiny_model.prompt(seed, length) for seed, length in enumerate(LENGTHS)]


@dataclass(frozen=True)
class Served:
    """A running system, where its model is and how that is called."""

    stack: Stack
    folder: Path
    model: str = MODEL

    @property
    def ends(self) -> list[int]:
        """Tokens that end an output: the config's, and the end of a turn in the template."""
        return list(Tokenizer.load(self.folder).eos_token_ids)

    def ask(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        streamed: bool = False,
        sampling: dict[str, Any] | None = None,
        stopping: dict[str, Any] | None = None,
        response: dict[str, Any] | None = None,
        cache: dict[str, Any] | None = None,
    ) -> list[pb.GenerateResponse]:
        """Whole answers to all prompts at once; streamed ones are put together here."""
        requests = [
            pb.GenerateRequest(
                model=self.model,
                token_ids=pb.TokenIds(ids=ids),
                sampling=sampling,
                stopping=stopping,
                response=response,
                cache=cache,
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


def write(folder: Path) -> Path:
    """The tiny model, with a template that has tools."""
    tiny_model.write(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE.read_text())
    return folder


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[Served]:
    """Writes the model to `folder` and serves it, with too few blocks for many at once: some are preempted.

    Fails where a process had to be started again, whatever was asked.
    """
    write(folder)
    flags = ["--model", str(folder), "--model-name", MODEL, "--dtype", "fp32", "--prefill-chunk", "48"]
    with running_stack(*flags, "--kv-blocks", "96", "--transport", "shared_memory") as stack:
        before = stack.pids()
        yield Served(stack, folder)
        stack.wait_idle()
        assert stack.pids() == before


def tokens(answer: pb.GenerateResponse) -> list[list[int]]:
    """Of each output, in order."""
    assert [output.index for output in answer.outputs] == list(range(len(answer.outputs)))
    return [list(output.token_ids) for output in answer.outputs]
