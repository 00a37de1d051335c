"""A model with recurrent layers, served: transformers' tokens through handoffs, hits and lost workers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from transformers import Lfm2Config

from diptych.v1 import inference_pb2 as pb
from tests.end_to_end import tiny_model
from tests.end_to_end.stack import running_stack
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
