"""Groups whose ranks compute with the native step: any degree to any degree, the tokens of one process."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import MixtralConfig

from diptych.engine.dtype import Precision
from kernels.cpu import library
from tests.end_to_end import reference, tiny_model
from tests.end_to_end.rank_processes import alone, answer, processes, resumed, serving

TOKENS = 24
ODD = {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96}
ONE_KV_HEAD = {"num_attention_heads": 6, "num_key_value_heads": 1, "hidden_size": 96}
EXPERTS = {"num_local_experts": 6, "num_experts_per_tok": 2, "num_hidden_layers": 3}
TP = {degree: {"tensor-parallel": degree} for degree in (1, 2, 3)}
PROMPTS = [tiny_model.prompt(seed, length) for seed, length in enumerate((5, 33, 100))]

pytestmark = pytest.mark.skipif(not library.library_path().exists(), reason="the native step was not built")


@pytest.mark.full
@pytest.mark.parametrize("precision", ["bf16", "int8"])
@pytest.mark.parametrize("sizes", [ODD, ONE_KV_HEAD], ids=["odd", "one-kv-head"])
@pytest.mark.parametrize(
    ("prefill", "decode", "transport"), [(1, 2, "tcp"), (2, 3, "shared_memory"), (3, 1, "shared_memory")]
)
def test_any_degree_to_any_other_is_one_process(
    tmp_path: Path, prefill: int, decode: int, transport: str, precision: Precision, sizes: dict[str, int]
) -> None:
    """Greedy streams, whose steps are launched ahead, also where one goes on after a rank's death."""
    model = tiny_model.write(tmp_path, **sizes)
    parts = 6 if decode == 3 and prefill == 2 else max(prefill, decode)
    expected = alone(model, parts, PROMPTS, TOKENS, precision=precision)
    with serving(model, TP[prefill], TP[decode], transport, precision=precision, backend="native") as stack:
        assert [answer(stack, prompt, TOKENS) for prompt in PROMPTS] == expected
        assert resumed(stack, PROMPTS[2], TOKENS, victim=decode - 1) == expected[2]
        stack.wait_idle(120)


@pytest.mark.full
@pytest.mark.parametrize(("prefill", "decode"), [(2, 1), (3, 1), (2, 2)])
def test_the_bundled_model_in_int8_is_one_process(prefill: int, decode: int) -> None:
    """Nine query heads, three KV heads, in the precision that is chosen for it."""
    model = reference.model_file()
    prompts = [list(reference.prompts()[index]) for index in (5, 12, 21)]
    expected = alone(model, max(prefill, decode), prompts, TOKENS, precision="int8")
    with serving("bundled", TP[prefill], TP[decode], precision="int8", backend="native") as stack:
        assert [answer(stack, prompt, TOKENS) for prompt in prompts] == expected
        assert len(processes(stack, "prefill")) == prefill


@pytest.mark.full
@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("whole", [True, False], ids=["whole", "sliced"])
@pytest.mark.parametrize(("prefill", "decode"), [(2, 1), (1, 2), (4, 2)])
def test_experts_of_any_degree_are_one_process(
    tmp_path: Path, prefill: int, decode: int, whole: bool, precision: Precision
) -> None:
    """Dealt whole and by inner numbers, also where a stream goes on after a rank's death."""
    model = tiny_model.write(tmp_path, config_class=MixtralConfig, **EXPERTS)
    parts = max(prefill, decode)
    expected = alone(model, parts, PROMPTS, TOKENS, whole_experts=whole, precision=precision)
    of_prefill, of_decode = (
        {"tensor-parallel": degree, "sum-parts": parts, "expert-parallel": whole}
        for degree in (prefill, decode)
    )
    with serving(model, of_prefill, of_decode, precision=precision, backend="native") as stack:
        assert [answer(stack, prompt, TOKENS) for prompt in PROMPTS] == expected
        assert resumed(stack, PROMPTS[2], TOKENS, victim=decode - 1) == expected[2]
        stack.wait_idle(120)
