"""Systems whose layers with a window have blocks of their own, and those where one block has all layers."""

from __future__ import annotations

import logging
from typing import Any, cast

import pytest
import torch

from decode_worker.config import DecodeSettings
from diptych.engine.backend import Backend
from diptych.engine.loaded_model import Model
from diptych.worker_process.engine_loader import ImpossibleSettings, _window_groups
from prefill_worker.config import PrefillSettings
from tests.diptych.worker_process.both_workers import SHAPE, WINDOWED


def model(**changes: Any) -> Model:
    given: dict[str, Any] = {"shape": WINDOWED, "backend_name": "native", **changes}
    return Model(precision="fp32", dtype=torch.float32, backend=cast(Backend, None), **given)


def decode(**changes: Any) -> DecodeSettings:
    return DecodeSettings(model="m", secret="ab" * 32, **changes)


def test_both_workers_have_the_same_groups() -> None:
    here = _window_groups(decode(), model())
    there = _window_groups(PrefillSettings(model="m", secret="ab" * 32), model(backend_name="torch"))
    assert here is not None
    assert here == there
    assert here.window == 9


@pytest.mark.parametrize(
    ("settings", "changes"),
    [
        ({}, {"backend_name": "triton", "device": torch.device("meta")}),
        ({"kv_cache_dtype": "int8"}, {}),
        ({"kv_cache_dtype": "fp8"}, {"backend_name": "triton"}),
    ],
)
def test_every_device_and_type_has_windowed_blocks(settings: dict[str, Any], changes: dict[str, Any]) -> None:
    assert _window_groups(decode(**settings), model(**changes)) is not None


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"window_blocks": "off"}, "--window-blocks off"),
        ({"window_blocks": "off", "kv_tier": "ram:1g"}, "--window-blocks off"),
        ({"tensor_parallel": 2}, "--tensor-parallel 2"),
        ({"speculative_model": "draft"}, "--speculative-model draft"),
    ],
)
def test_one_block_has_all_layers_and_the_log_says_why(
    settings: dict[str, Any], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    assert _window_groups(decode(**settings), model()) is None
    assert [record.getMessage() for record in caplog.records] == [
        f"blocks behind the window of 9 tokens are kept: {why}"
    ]


def test_a_model_without_windows_goes_with_tiers(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert _window_groups(decode(kv_tier="ram:1g"), model(shape=SHAPE)) is None
    assert not caplog.records


def test_tiers_beside_windowed_blocks_are_refused() -> None:
    with pytest.raises(ImpossibleSettings, match=r"--kv-tier .+: set --window-blocks off, everywhere$"):
        _window_groups(decode(kv_tier="ram:1g"), model())
