"""A model whose layers have a sliding window, served with blocks of their own: transformers' tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import Gemma3TextConfig

from diptych.v1 import inference_pb2 as pb
from tests.end_to_end import tiny_model
from tests.end_to_end.stack import running_stack
from tests.end_to_end.tiny_system import Served, tokens

WINDOW, ANSWER = 40, 60
SIZES = {
    "head_dim": 16,
    "num_hidden_layers": 6,
    "sliding_window": WINDOW,
    "sliding_window_pattern": 3,
    "query_pre_attn_scalar": 16,
}
PROMPTS = [tiny_model.prompt(seed, length) for seed, length in enumerate((1, 16, 33, 64, 130, 200, 400))]


def lost(folder: Path, prompt: list[int], answer: list[int]) -> float:
    """Return by how much a token of the answer is less likely than transformers' best one, at most."""
    scores = tiny_model.log_softmax(folder, [*prompt, *answer])[len(prompt) - 1 : -1]
    return float((scores.max(dim=-1).values - scores[range(len(answer)), answer]).max())


def answers(served: Served, prompts: list[list[int]]) -> list[pb.GenerateResponse]:
    return served.ask(
        prompts,
        sampling={"temperature": 0.0},
        stopping={"max_tokens": ANSWER, "ignore_eos": True},
    )


@pytest.mark.full
@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize("transport", ["shared_memory", "tcp"])
def test_answers_are_those_of_transformers(tmp_path: Path, transport: str, backend: str) -> None:
    folder = tiny_model.write(tmp_path / "gemma", config_class=Gemma3TextConfig, **SIZES)
    flags = ["--model", str(folder), "--model-name", "gemma", "--dtype", "fp32", "--prefill-chunk", "48"]
    flags += ["--transport", transport, "--kv-blocks", "260"]
    flags += ["--set", f"prefill.backend={backend}", "--set", f"decode.backend={backend}"]
    with running_stack(*flags) as stack:
        served = Served(stack, folder, "gemma")
        first = [tokens(answer)[0] for answer in answers(served, PROMPTS)]
        assert [len(answer) for answer in first] == [ANSWER] * len(PROMPTS)
        assert max(lost(folder, *one) for one in zip(PROMPTS, first, strict=True)) == 0
        (again,) = answers(served, [PROMPTS[-1]])
        assert tokens(again) == first[-1:]
        assert again.usage.cached_prompt_tokens == 384
        turn = [*PROMPTS[-1], *first[-1], 7, 8, 9]
        (second,) = answers(served, [turn])
        assert lost(folder, turn, tokens(second)[0]) == 0
        assert second.usage.cached_prompt_tokens == 448
        begun = tiny_model.prompt(50, 100)
        for seed, cached in ((61, 0), (62, 0), (63, 96)):
            prompt = [*begun, *tiny_model.prompt(seed, 30)]
            (found,) = answers(served, [prompt])
            assert lost(folder, prompt, tokens(found)[0]) == 0
            # Where blocks are copied either worker may have computed a prompt, and has it alone.
            assert transport == "tcp" or found.usage.cached_prompt_tokens == cached
        stack.wait_idle()
