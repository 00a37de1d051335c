"""What `--dtype auto` takes."""

from __future__ import annotations

import pytest
import torch

from engine.precision import Precision, choose_precision, stored_dtype


@pytest.mark.parametrize(
    ("features", "expected"),
    [
        ({"fpu", "amx_bf16"}, "bf16"),
        ({"avx512_bf16"}, "bf16"),
        ({"avx512f", "avx512_fp16"}, "fp32"),
        (set(), "fp32"),
    ],
)
def test_auto(features: set[str], expected: Precision) -> None:
    assert choose_precision(features) == expected


def test_quantised_models_keep_bf16_keys_and_values() -> None:
    assert [stored_dtype(p) for p in ("fp32", "bf16", "int8", "gguf")] == [
        torch.float32,
        torch.bfloat16,
        torch.bfloat16,
        torch.bfloat16,
    ]
