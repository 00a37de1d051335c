"""One client that stops reading, as reported: others are served, and the memory of what it left goes back."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import grpc
import pytest

from diptych.v1 import inference_pb2 as pb
from diptych.v1 import inference_pb2_grpc
from tests.end_to_end import tiny_system
from tests.end_to_end.stack import Stack, running_stack

FIXED_WINDOW = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65535)]
CHOICES = 72  # as many as run at once, here
STALLED = 24
KEPT_MIB = 40.0
LIMITS = ("--set", "gateway.write-timeout=60", "--set", "gateway.stream-buffer-mib=256")


@pytest.fixture(scope="module")
def impatient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Run a tiny model: the gateway holds what is not read, whatever model it comes from."""
    folder = tiny_system.write(tmp_path_factory.mktemp("tiny"))
    with running_stack("--model", str(folder), "--model-name", tiny_system.MODEL, *LIMITS) as stack:
        yield stack


def request(n: int, max_tokens: int, logprobs: int | None = None) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        model=tiny_system.MODEL,
        text="The capital of France is",
        sampling=pb.SamplingParams(n=n, seed=1, temperature=1.0),
        stopping=pb.StoppingCriteria(max_tokens=max_tokens, ignore_eos=True),
        response=pb.ResponseOptions(logprobs=logprobs),
    )


async def stop_reading(address: str, streams: int, asked: pb.GenerateRequest, served: int) -> None:
    """Leave ``streams`` streams unread, and expect ``served`` requests of another client to be served."""
    async with (
        grpc.aio.insecure_channel(address, options=FIXED_WINDOW) as unread,
        grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel,
    ):
        stopped = [
            inference_pb2_grpc.InferenceServiceStub(unread).StreamGenerate(asked) for _ in range(streams)
        ]
        for call in stopped:
            await call.read()
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        for _ in range(served):
            answer = await stub.Generate(request(1, 8), timeout=30)
            assert answer.usage.completion_tokens == 8
        for call in stopped:
            call.cancel()


def test_stream_of_72_choices_that_is_not_read_leaves_room_for_others(impatient: Stack) -> None:
    asyncio.run(stop_reading(impatient.address, 1, request(CHOICES, 200, logprobs=20), served=5))
    impatient.wait_idle()


def test_more_choices_than_run_at_once_all_finish(impatient: Stack) -> None:
    async def run() -> list[pb.GenerateResponse]:
        async with grpc.aio.insecure_channel(impatient.address) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            return [message async for message in stub.StreamGenerate(request(100, 4))]

    ends = [
        output.index for message in asyncio.run(run()) for output in message.outputs if output.finish_reason
    ]
    assert sorted(ends) == list(range(100))
    impatient.wait_idle()


def test_memory_of_unread_streams_goes_back(impatient: Stack) -> None:
    before = impatient.metric("gateway", "process_resident_memory_bytes")
    asyncio.run(stop_reading(impatient.address, STALLED, request(2, 200, logprobs=20), served=20))
    impatient.wait_idle()
    asyncio.run(asyncio.sleep(3))
    after = impatient.metric("gateway", "process_resident_memory_bytes")
    assert impatient.metric("gateway", "diptych_unread_output_bytes") == 0
    assert (after - before) / (1 << 20) < KEPT_MIB
