"""Far too little KV memory: requests wait, are preempted and come back, and every answer is right."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import grpc
import pytest

from diptych.v1 import inference_pb2 as pb
from diptych.v1 import inference_pb2_grpc
from tests.end_to_end import reference
from tests.end_to_end.http_requests import many_greedy, teach_short_outputs
from tests.end_to_end.stack import Stack, running_stack

STREAMS = 64
MAX_TOKENS = 16
KV_BLOCKS = 24  # 384 tokens, where the streams together need more than 5,000
WAVES = 5  # at most: the gateway soon learns how long outputs are, and a wave may fit after all
SEVERAL = (
    {"n": 3, "temperature": 1.0},
    {"n": 4, "temperature": 0.8, "top_p": 0.9, "frequency_penalty": 0.5},
    {"n": 2, "best_of": 4, "temperature": 1.2},
    {"n": 2, "beam_width": 4},
)


@pytest.fixture(scope="module")
def crowded() -> Iterator[Stack]:
    with running_stack("--dtype", "fp32", "--kv-blocks", str(KV_BLOCKS)) as stack:
        yield stack


def test_64_streams_in_a_pool_far_too_small_all_finish_with_the_right_text(crowded: Stack) -> None:
    by_length = [prompt for prompt in reference.short_prompts() if len(prompt) <= 260]
    prompts = [by_length[n % len(by_length)] for n in range(STREAMS)]
    assert sum(len(prompt) + MAX_TOKENS for prompt in prompts) > 10 * KV_BLOCKS * 16
    preempted = 0.0
    for _ in range(WAVES):
        teach_short_outputs(crowded.address)
        answers = asyncio.run(many_greedy(crowded.address, prompts, MAX_TOKENS, at_a_time=STREAMS))
        preempted = crowded.metric("decode", "diptych_preemptions_total")
        crowded.wait_idle()
        wrong = [
            (n, len(prompt))
            for n, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
            if not reference.is_greedy(tuple(prompt), answer, MAX_TOKENS)
        ]
        assert wrong == []
        if preempted:
            break
    assert preempted > 0, "nobody was preempted: the pool was not too small after all"


@pytest.mark.full  # tests/diptych/worker_process/test_random_choices.py preempts choices in one process
def test_several_outputs_are_the_same_in_a_crowd_as_alone(crowded: Stack) -> None:
    """Choices are preempted one by one and go on with their own tokens; beams start again as a whole."""
    asked = [several(index) for index in range(8)]

    async def run(*, at_once: bool) -> list[dict[int, list[int]]]:
        async with grpc.aio.insecure_channel(crowded.address) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            if at_once:
                return await asyncio.gather(*(outputs(stub, request) for request in asked))
            return [await outputs(stub, request) for request in asked]

    alone = asyncio.run(run(at_once=False))
    before = preempted = crowded.metric("decode", "diptych_preemptions_total")
    for _ in range(WAVES):
        teach_short_outputs(crowded.address)
        assert asyncio.run(run(at_once=True)) == alone
        preempted = crowded.metric("decode", "diptych_preemptions_total")
        crowded.wait_idle()
        if preempted > before:
            break
    assert preempted > before, "nobody was preempted: the pool was not too small after all"


def several(index: int) -> pb.GenerateRequest:
    knobs = SEVERAL[index % len(SEVERAL)]
    seed = {} if "beam_width" in knobs else {"seed": index}
    prompt = next(p for p in reference.prompts()[index % 8 :] if len(p) > 1)
    return pb.GenerateRequest(
        model=reference.MODEL,
        token_ids=pb.TokenIds(ids=prompt),
        sampling=pb.SamplingParams(**knobs, **seed),  # type: ignore[arg-type]
        stopping=pb.StoppingCriteria(max_tokens=MAX_TOKENS, ignore_eos=True),
    )


async def outputs(
    stub: inference_pb2_grpc.InferenceServiceStub, request: pb.GenerateRequest
) -> dict[int, list[int]]:
    """Token ids by index; each output ends once."""
    ids: dict[int, list[int]] = {}
    ends = []
    async for message in stub.StreamGenerate(request, timeout=120):
        for output in message.outputs:
            ids.setdefault(output.index, []).extend(output.token_ids)
            if output.finish_reason:
                ends.append(output.index)
    assert sorted(ends) == list(range(request.sampling.n))
    return ids
