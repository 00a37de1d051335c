"""Default tiles fit the memory that a card gives a program."""

from __future__ import annotations

import pytest

from kernels.gpu.tuning import prefill_bytes, prefill_default

H200, A100, L40S = 227 << 10, 163 << 10, 99 << 10
"""Bytes of compute capability 9.0, 8.0 and 8.9 (CUDA C++ Programming Guide, technical specifications)."""


@pytest.mark.parametrize("memory", [H200, A100, L40S])
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_prefill_s_tiles_fit_every_card(head_dim: int, itemsize: int, memory: int) -> None:
    found = dict(prefill_default(head_dim, itemsize, memory))
    held = prefill_bytes(head_dim, itemsize, found["rows"], found["tile"], found["num_stages"])
    assert held < memory
    assert min(found["rows"], found["tile"]) >= 16, "sides of matrix instructions"


def test_tiles_that_were_measured_stay_and_smaller_cards_have_smaller_ones() -> None:
    measured = (("rows", 128), ("tile", 64), ("num_warps", 4), ("num_stages", 2))
    assert prefill_default(128, 2) == prefill_default(128, 2, H200) == measured
    assert dict(prefill_default(256, 2))["num_warps"] == 8
    assert prefill_bytes(256, 2, 128, 64, 2) > A100, "the H200's would not start there"
    assert dict(prefill_default(256, 2, A100))["tile"] == 32
    assert dict(prefill_default(256, 2, L40S))["rows"] == 32
    assert dict(prefill_default(96, 2, L40S))["tile"] == 32, "96 numbers take the room of 128"
