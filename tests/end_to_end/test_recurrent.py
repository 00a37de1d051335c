"""A model with recurrent layers, served: transformers' tokens through handoffs, hits and lost workers."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from transformers import Lfm2Config

from diptych.client import AsyncClient
from diptych.engine.generate import generate_choices
from diptych.engine.generate_beams import generate_beams
from diptych.engine.kv.block_pool import BlockPool
from diptych.engine.kv.kv_memory import KVMemory
from diptych.engine.loaded_model import load_model
from diptych.engine.runner import Runner
from diptych.engine.sampling import SamplingParams
from diptych.v1 import inference_pb2 as pb
from tests.end_to_end import tiny_model
from tests.end_to_end.stack import Stack, running_stack
from tests.end_to_end.tiny_system import Served, tokens

ANSWER = 60
SIZES = {
    "num_hidden_layers": 5,
    "full_attn_idxs": [1, 4],
    "block_multiple_of": 16,
    "conv_L_cache": 4,
    "conv_bias": True,
}
PROMPTS = [tiny_model.prompt(seed, length) for seed, length in enumerate((1, 16, 33, 64, 130, 200, 400))]


def best(folder: Path, prompt: list[int], answer: list[int]) -> bool:
    """Return whether each token of an answer is transformers' likeliest one."""
    scores = tiny_model.log_softmax(folder, [*prompt, *answer])[len(prompt) - 1 : -1]
    return bool((scores.max(dim=-1).values == scores[range(len(answer)), answer]).all())


def answers(served: Served, prompts: list[list[int]], count: int = ANSWER) -> list[pb.GenerateResponse]:
    return served.ask(
        prompts,
        sampling={"temperature": 0.0},
        stopping={"max_tokens": count, "ignore_eos": True},
    )


@contextmanager
def serving(folder: Path, *flags: str) -> Iterator[Served]:
    tiny_model.write(folder, config_class=Lfm2Config, **SIZES)
    plain = ["--model", str(folder), "--model-name", "lfm2", "--dtype", "fp32", "--prefill-chunk", "48"]
    with running_stack(*plain, *flags, "--kv-blocks", "260") as stack:
        yield Served(stack, folder, "lfm2")


@pytest.mark.parametrize("transport", ["shared_memory", pytest.param("tcp", marks=pytest.mark.full)])
def test_answers_are_those_of_transformers(tmp_path: Path, transport: str) -> None:
    folder = tmp_path / "lfm2"
    with serving(folder, "--transport", transport) as served:
        first = [tokens(answer)[0] for answer in answers(served, PROMPTS)]
        assert [len(answer) for answer in first] == [ANSWER] * len(PROMPTS)
        assert all(best(folder, *one) for one in zip(PROMPTS, first, strict=True))
        (again,) = answers(served, [PROMPTS[-1]])
        assert tokens(again) == first[-1:]
        assert again.usage.cached_prompt_tokens == 384
        turn = [*PROMPTS[-1], *first[-1], 7, 8, 9]
        (second,) = answers(served, [turn])
        assert best(folder, turn, tokens(second)[0])
        assert second.usage.cached_prompt_tokens == 448
        begun = tiny_model.prompt(50, 100)
        for seed, cached in ((61, 0), (62, 0), (63, 96)):
            prompt = [*begun, *tiny_model.prompt(seed, 30)]
            (found,) = answers(served, [prompt])
            assert best(folder, prompt, tokens(found)[0])
            assert transport == "tcp" or found.usage.cached_prompt_tokens == cached
        served.stack.wait_idle()


@pytest.mark.full
@pytest.mark.parametrize("transport", ["shared_memory", "tcp"])
def test_drafted_answers_are_those_of_transformers(tmp_path: Path, transport: str) -> None:
    """A pattern leaves the answers no choice, so that drafts are right; the next prompts go on from them."""
    folder = tmp_path / "lfm2"
    with serving(folder, "--transport", transport, "--speculative-tokens", "4") as served:
        prompts = [tiny_model.prompt(seed, length) for seed, length in ((5, 7), (6, 64), (7, 90))]
        fixed = asyncio.run(_fixed(served.stack, prompts))
        for prompt, (answer, drafted, accepted) in zip(prompts, fixed, strict=True):
            assert len(answer) / 2 < accepted < min(drafted, len(answer))
            turn = [*prompt, *answer, 7, 8, 9]
            (found,) = answers(served, [turn])
            assert best(folder, turn, tokens(found)[0])
            if transport != "tcp":
                assert found.usage.cached_prompt_tokens > len(prompt)
        served.stack.wait_idle()


async def _fixed(stack: Stack, prompts: list[list[int]]) -> list[tuple[list[int], int, int]]:
    """Return answers of one fixed text, with their tokens that were drafted and those that were right."""
    found = []
    async with AsyncClient(stack.address) as client:
        for prompt in prompts:
            one = await client.generate(
                tuple(prompt), regex=10 * "alphabet ", max_tokens=200, temperature=0.0, timeout_s=120
            )
            usage = one.usage
            found.append((list(one.choices[0].token_ids), usage.drafted_tokens, usage.accepted_draft_tokens))
    return found


@pytest.mark.full
@pytest.mark.parametrize("drafts", ["0", "4"])
@pytest.mark.parametrize("transport", ["shared_memory", "tcp"])
def test_a_stream_goes_on_after_its_decode_worker_died(tmp_path: Path, transport: str, drafts: str) -> None:
    """Compute the states that died with the worker from the delivered tokens, with the same text."""
    folder = tmp_path / "lfm2"
    flags = ("--transport", transport, "--speculative-tokens", drafts, "--decode-workers", "2")
    with serving(folder, *flags) as served:
        prompt = PROMPTS[4]
        whole = asyncio.run(_streamed(served.stack, prompt, kill=False))
        cut = asyncio.run(_streamed(served.stack, prompt, kill=True))
    assert cut == whole
    assert best(folder, prompt, whole)


async def _streamed(stack: Stack, prompt: list[int], *, kill: bool) -> list[int]:
    """Return the tokens of a stream; with `kill` its decode worker is killed after some of them."""
    found: list[int] = []
    async with AsyncClient(stack.address) as client:
        async for chunk in client.stream(
            tuple(prompt), max_tokens=500, temperature=0.0, ignore_eos=True, timeout_s=120
        ):
            found += chunk.token_ids
            if kill and len(found) >= 20:
                (busy,) = [i for i in range(2) if stack.metric("decode", "diptych_requests_running", i)]
                os.kill(stack.account["decode"][busy]["pid"], signal.SIGKILL)
                kill = False
    assert not kill, "the stream was over before its worker could be killed"
    return found


@pytest.mark.full
def test_drawn_choices_and_beams_are_those_of_one_process(tmp_path: Path) -> None:
    folder = tmp_path / "lfm2"
    with serving(folder) as served:
        drawn = {"temperature": 1.0, "seed": 5, "n": 3}
        stopping = {"max_tokens": 40, "ignore_eos": True}
        (choices,) = served.ask([PROMPTS[5]], sampling=drawn, stopping=stopping)
        beam = {"beam_width": 4, "n": 2}
        (beams,) = served.ask([PROMPTS[5]], sampling=beam, stopping={"max_tokens": 24})
    model = load_model(folder, "fp32")
    runner, memory, pool = Runner(model, 1), KVMemory(model.kv_layout(16), 300), BlockPool(300)
    params = SamplingParams(temperature=1.0, seed=5)
    alone = generate_choices(runner, memory, pool, PROMPTS[5], params, count=3, max_tokens=40, chunk=23)
    assert tokens(choices) == [[one.token_id for one in answer] for answer in alone]
    ends = served.ends
    plain = SamplingParams(temperature=0.0)
    found = generate_beams(
        runner, memory, pool, PROMPTS[5], plain, width=4, count=2, max_tokens=24, stop_ids=ends
    )
    assert tokens(beams) == [[one for one in beam.token_ids if one not in ends] for beam in found]
