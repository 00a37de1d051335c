"""Families with recurrent layers, served: transformers' tokens over handoffs, hits and many streams."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING

from tests.end_to_end import tiny_model
from tests.end_to_end.stack import running_stack
from tests.end_to_end.test_recurrent import PROMPTS, answers, best
from tests.end_to_end.tiny_system import Served, tokens

_MAMBA2 = {"mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_state": 16}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {
        "head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "num_hidden_layers": 4,
    },
    "granitemoehybrid": {
        **_MAMBA2,
        "num_hidden_layers": 3,
        "layer_types": ["mamba", "attention", "mamba"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 40,
        "attention_multiplier": 0.25,
    },
    "falcon_h1": {**_MAMBA2, "mamba_d_ssm": 64, "key_multiplier": 0.5, "ssm_in_multiplier": 0.8},
    "nemotron_h": {
        "hybrid_override_pattern": "M*-M",
        "head_dim": 16,
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "n_groups": 2,
        "ssm_state_size": 16,
    },
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 4, "mamba_d_state": 8},
}
"""Fields of a small model of each family."""


def write(folder: Path, family: str) -> None:
    """Write a model whose states are felt for long: random ones forget within a few tokens."""
    fields = dict(FAMILIES[family])
    if family != "nemotron_h":
        fields.setdefault("num_hidden_layers", 2)
    tiny_model.write(folder, config_class=CONFIG_MAPPING[family], **fields)
    model = tiny_model.oracle(folder)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.uniform_(-5.0, -2.0)
    model.save_pretrained(folder)


@pytest.mark.parametrize(
    "family",
    [name if name == "qwen3_5_text" else pytest.param(name, marks=pytest.mark.full) for name in FAMILIES],
)
def test_answers_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    folder = tmp_path / family
    write(folder, family)
    plain = ["--model", str(folder), "--model-name", family, "--dtype", "fp32", "--prefill-chunk", "48"]
    with running_stack(*plain, "--kv-blocks", "1200", "--block-size", "16") as stack:
        served = Served(stack, folder, family)
        first = [tokens(answer)[0] for answer in answers(served, PROMPTS, 40)]
        assert [len(answer) for answer in first] == [40] * len(PROMPTS)
        assert all(best(folder, *one) for one in zip(PROMPTS, first, strict=True))
        turn = [*PROMPTS[-1], *first[-1], 7, 8, 9]
        (second,) = answers(served, [turn], 40)
        assert best(folder, turn, tokens(second)[0])
        assert second.usage.cached_prompt_tokens == 432
        served.stack.wait_idle()
