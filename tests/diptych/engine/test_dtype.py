"""Precision that `--dtype auto` chooses."""

from __future__ import annotations

import pytest
import torch

from diptych.engine.dtype import Precision, choose_precision, stored_dtype


@pytest.mark.parametrize(
    ("quantised_file", "native", "features", "expected"),
    [
        (True, True, {"avx2"}, "gguf"),
        (True, True, {"avx512f"}, "gguf"),
        (True, True, {"avx512_vnni"}, "int8"),
        (True, False, {"avx512_bf16"}, "bf16"),
        (True, False, set(), "fp32"),
        (False, True, {"fpu", "amx_bf16"}, "bf16"),
        (False, True, {"avx512_bf16"}, "bf16"),
        (False, True, {"avx512f", "avx512_fp16"}, "fp32"),
    ],
)
def test_choose_precision_of_auto_by_file_and_cpu(
    quantised_file: bool, native: bool, features: set[str], expected: Precision
) -> None:
    chosen = choose_precision(quantised_file=quantised_file, native=native, cpu_features=features)
    assert chosen == expected


@pytest.mark.parametrize(("file_bytes", "expected"), [(1 << 30, "int8"), ((1 << 30) + 1, "gguf")])
def test_a_large_file_keeps_its_own_blocks(file_bytes: int, expected: Precision) -> None:
    chosen = choose_precision(
        quantised_file=True, native=True, cpu_features={"avx512_vnni"}, file_bytes=file_bytes
    )
    assert chosen == expected


def test_a_gpu_computes_in_bf16_or_in_the_codes_of_a_file_that_it_packs() -> None:
    for packs, expected in ((True, "packed"), (False, "bf16")):
        chosen = choose_precision(
            quantised_file=True, native=True, cpu_features={"avx512_bf16"}, on_gpu=True, packs=packs
        )
        assert chosen == expected


def test_quantised_models_keep_bf16_keys_and_values() -> None:
    assert [stored_dtype(p) for p in ("fp32", "bf16", "int8", "gguf")] == [
        torch.float32,
        torch.bfloat16,
        torch.bfloat16,
        torch.bfloat16,
    ]


def test_kquants_are_computed_in_their_blocks_though_the_file_is_small() -> None:
    features = ["avx512_vnni"]
    for kquants, expected in ((False, "int8"), (True, "gguf")):
        chosen = choose_precision(
            quantised_file=True, native=True, cpu_features=features, file_bytes=1 << 20, kquants=kquants
        )
        assert chosen == expected
