"""Default tiles fit the memory that a card gives a program."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kernels.gpu import tuning
from kernels.gpu.card_tiles import CARDS, card_of, decode_programs
from kernels.gpu.tuning import decode_default, prefill_bytes, prefill_default

H200, A100, L40S = 227 << 10, 163 << 10, 99 << 10
"""Bytes of compute capability 9.0, 8.0 and 8.9 (CUDA C++ Programming Guide, technical specifications)."""
NAMES = {
    "NVIDIA H200": 16,
    "NVIDIA H100 80GB HBM3": 11,
    "NVIDIA A100-SXM4-80GB": 8,
    "NVIDIA L40S": 4,
    "NVIDIA GeForce RTX 4090": 4,
    "an unknown card": 16,
}


def test_every_card_has_programs_of_decode_attention() -> None:
    assert {name: decode_programs(name, 16) for name in NAMES} == NAMES
    assert {card.name for card in CARDS} == {found.name for name in NAMES if (found := card_of(name))}
    assert [card.name for card in CARDS if card.measured] == ["H200"]


def test_what_the_tuner_found_goes_before_the_card_s_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(tuning.FILE_VARIABLE, str(tmp_path / "found.json"))
    monkeypatch.setattr(tuning, "device_name", lambda device: "NVIDIA A100-SXM4-80GB")
    device, default = torch.device("cpu"), decode_default(128, 2, 16)
    tuning.look_up.cache_clear()
    assert tuning.look_up(device, "paged_decode", "of some shape", default)["programs"] == 8
    tuning.keep(device, "paged_decode", "of some shape", {"programs": 6})
    found = tuning.look_up(device, "paged_decode", "of some shape", default)
    assert found == {**dict(default), "programs": 6}
    assert tuning.look_up(device, "paged_decode", "of another", default)["programs"] == 8
    tuning.look_up.cache_clear()


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
