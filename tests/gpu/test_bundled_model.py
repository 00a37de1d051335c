"""The bundled model on a GPU: greedy text is transformers' in fp32, deviations of half precision are told."""

from __future__ import annotations

from itertools import takewhile

import pytest
import torch

from diptych.engine.dtype import Precision
from diptych.engine.generate import generate
from diptych.engine.kv.block_pool import BlockPool
from diptych.engine.loaded_model import load_model
from diptych.engine.runner import Runner
from diptych.engine.sampling import SamplingParams
from tests.end_to_end import reference

TOKENS = reference.MOST_TOKENS
BLOCKS = 400
DEVICE = "cuda"

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def prompts() -> tuple[tuple[int, ...], ...]:
    """Thirty, of 1 to 512 tokens."""
    return reference.prompts()[:30]


def answers(precision: Precision, *, graphs: bool) -> list[tuple[int, ...]]:
    model = load_model(reference.model_file(), precision, device=DEVICE)
    runner = Runner(model, 1)
    memory = model.kv_memory(model.kv_layout(16), BLOCKS)
    if graphs:
        runner.plan_decode(4, 16)
        runner.prepare_decode(memory)
    greedy, stop = SamplingParams(temperature=0.0), reference.tokenizer().eos_token_ids
    return [
        reference.without_end(
            generate(runner, memory, BlockPool(BLOCKS), prompt, greedy, max_tokens=TOKENS, stop_ids=stop)
        )
        for prompt in prompts()
    ]


def agreed(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """Return how many tokens two texts have in common before they part."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


@pytest.mark.parametrize("graphs", [False, True])
def test_greedy_text_in_fp32_is_that_of_transformers(graphs: bool) -> None:
    expected = [reference.greedy(prompt, TOKENS) for prompt in prompts()]
    assert answers("fp32", graphs=graphs) == expected


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_deviations_of_half_precision_are_reported(
    precision: Precision, capsys: pytest.CaptureFixture[str]
) -> None:
    got = answers(precision, graphs=True)
    expected = [reference.greedy(prompt, TOKENS) for prompt in prompts()]
    same = sum(one == other for one, other in zip(got, expected, strict=True))
    first = [agreed(one, other) for one, other in zip(got, expected, strict=True)]
    with capsys.disabled():
        print(f"\n{precision}: {same} of {len(got)} texts as in fp32; tokens until they part {sorted(first)}")
    assert all(got)
