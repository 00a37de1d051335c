"""`--batch-invariant`: what it refuses, and that workers with and without it exchange no blocks."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from decode_worker.config import DecodeSettings
from diptych.engine.backend import Backend
from diptych.engine.loaded_model import Model, load_model
from diptych.engine.models.shape import UnsupportedModel
from diptych.engine.runner import Runner
from diptych.runtime.settings import resolve_model
from diptych.worker_process.config import why_not_together
from diptych.worker_process.loaded_engine import LoadedEngine
from tests.diptych.worker_process.both_workers import SHAPE


def decode(**changes: Any) -> DecodeSettings:
    return DecodeSettings(model="m", secret="ab" * 32, **changes)


@pytest.mark.parametrize(
    ("settings", "device", "why"),
    [
        ({"backend": "torch"}, "cpu", "--backend torch rounds by the number of rows, native does not"),
        ({"tensor_parallel": 2}, "auto", "--batch-invariant is not promised with --tensor-parallel 2"),
        ({"sum_parts": 3}, "auto", "--batch-invariant is not promised with --sum-parts 3"),
    ],
)
def test_settings_that_keep_no_order_of_sums_are_refused(
    settings: dict[str, Any], device: str, why: str
) -> None:
    decode(device=device, **settings)
    with pytest.raises(ValueError, match=why):
        decode(device=device, batch_invariant=True, **settings)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_flag_goes_with_the_other_backends(device: str) -> None:
    assert why_not_together(decode(batch_invariant=True), device) is None


def test_torch_does_not_compute_in_its_place() -> None:
    path = resolve_model("bundled")
    with pytest.raises(UnsupportedModel, match="--batch-invariant: torch picks its kernels"):
        load_model(path, "fp32", backend="torch", batch_invariant=True)


@pytest.mark.parametrize("own_order", [False, True])
def test_blocks_of_the_two_modes_are_of_different_layouts(own_order: bool) -> None:
    model = Model(
        SHAPE,
        "bf16",
        torch.bfloat16,
        cast(Backend, None),
        "triton",
        torch.device("cuda"),
        own_order=own_order,
    )
    engine = LoadedEngine(model, cast(Runner, None), model.kv_layout(16), "digest", "bf16")
    assert ("batch-invariant" in engine.fingerprint.kv_layout) == own_order
    assert ("batch-invariant" in engine.computes) == own_order
